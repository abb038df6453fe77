"""The identity of a record: picture, prompt, model and settings. All record ids are computed here."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llama_adapter.app.captioning.tasks.task import FREE_TEXT, Task, task_settings

if TYPE_CHECKING:  # readers of records need no torch
    from llama_adapter.app.models.spec import CaptionerSpec, ModelInfo
    from llama_adapter.llm.engine.sampling_params import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordKey:
    """Everything an answer depends on, except the bytes of the picture. Equal ids mean the work is already done."""

    picture: str  # its name in the record
    prompt: str  # as in the record
    model_digest: str
    settings: Mapping[str, Any]  # JSON values, see `record_settings`; the order of the keys does not matter

    def id(self, digest: str) -> str:
        """The record's id, 32 hex digits. `digest` is the digest of the picture's bytes, "" if they could not be read.

        Without a digest, the name identifies the picture.
        """
        parts = [digest or f"name:{self.picture}", self.prompt, self.model_digest, dict(self.settings)]
        canonical = json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(canonical.encode()).hexdigest()[:32]


def record_settings(
    spec: "CaptionerSpec",
    *,
    info: "ModelInfo",
    sampling: "SamplingParams",
    task: Task = FREE_TEXT,
    form: str = "instruction",
    input: str | None = None,
) -> dict[str, Any]:
    """The `settings` of a key. `spec` and `info` are those of the loaded model.

    `form` ("instruction" or "raw") and `input` distinguish prompts that look the same in a record.
    """
    return {
        **sampling.settings(),
        **task_settings(task),
        "form": form,
        "input": input,
        "exif": spec.exif,
        "dtype": info.dtype,
        "context": info.context,
        "channel_order": spec.channel_order,
        # Default values are left out, so that ids of earlier versions stay the same.
        **({} if spec.reading == "exact" else {"reading": spec.reading}),
        **({} if spec.transparency == "white" else {"transparency": spec.transparency}),
        **({} if info.precision == "float" else {"precision": info.precision}),
        **({} if info.encoder is None else {"encoder": info.encoder}),
        **({} if info.past is None else {"past_key_values": info.past}),
        **({} if info.template_id is None else {"template": info.template_id}),
    }
