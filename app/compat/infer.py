"""`InferTask`: MindSpore Lite's factory of pipelines, implemented with `pipeline`."""

from collections.abc import Mapping
from typing import Any

from llama_adapter.app.compat.mindir import names_graphs
from llama_adapter.app.compat.pipeline import Pipeline, pipeline, task_names


class InferTask:
    """Makes pipelines from an `InferConfig`."""

    open_pipeline = staticmethod(pipeline)

    @classmethod
    def get_infer_task(cls, task_type: str, task_config: Mapping[str, Any], **settings: Any) -> Pipeline:
        """The pipeline for a task. `settings` are those of `pipeline`, such as `tokenizer`.

        MindSpore Lite runs MindIR graphs, unless `backend` names another program. Raises what `pipeline` raises.
        """
        settings.setdefault("backend", "mslite" if names_graphs(task_config) else "torch")
        return cls.open_pipeline(task_type, task_config, **settings)

    @classmethod
    def check_task_valid(cls, task_type: str) -> bool:
        """Whether `task_type` is a known task."""
        return task_type in task_names()

    @classmethod
    def support_list(cls) -> list[str]:
        """The names of all tasks."""
        return task_names()
