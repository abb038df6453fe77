"""What an answer depends on beside picture, prompt and model, as a record's id counts it. Plain values."""

from dataclasses import asdict
from typing import Any

from llama_adapter.app.models.spec import CaptionerSpec, ModelInfo
from llama_adapter.app.tasks.task import FREE_TEXT, Task, task_settings
from llama_adapter.llm.engine.sampling_params import SamplingParams


def record_settings(
    spec: CaptionerSpec,
    *,
    info: ModelInfo,
    sampling: SamplingParams,
    task: Task = FREE_TEXT,
    form: str = "instruction",
    input: str | None = None,
) -> dict[str, Any]:
    """JSON values. `spec` and `info` are those of the loaded model; `form` and `input` as in `jobs.questions.Question`.

    Whoever asks the same by other means gets the same ids.
    """
    return {
        **asdict(sampling),
        **task_settings(task),
        "form": form,
        "input": input,
        "exif": spec.exif,
        "dtype": info.dtype,
        "context": info.context,
        "channel_order": spec.channel_order,
        **({} if spec.reading == "exact" else {"reading": spec.reading}),
        **({} if info.precision == "float" else {"precision": info.precision}),
        # An exported encoder has its own number type, so that answers may differ.
        **({} if info.encoder is None else {"encoder": info.encoder}),
    }
