"""A model description for tests that load no model."""

from llama_adapter.app.models.spec import ModelInfo

INFO = ModelInfo(
    name="tiny",
    digest="ab" * 32,
    device="cpu",
    dtype="float32",
    precision="float",
    vision="torch",
    mode="eager",
    operators="aten",
    encoder=None,
    context=64,
    default_prompt="Describe it",
)
