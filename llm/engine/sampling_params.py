"""Settings of token sampling, as plain values. Imports no torch: the command line reads the defaults."""

from dataclasses import dataclass


# Without slots, so that a default can be read off the class: SamplingParams.top_p.
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen. The default is greedy, where top_p and top_k have no effect."""

    max_new_tokens: int = 64
    temperature: float = 0.0  # below 1e-6 means greedy: dividing by it would leave float32's range
    top_p: float = 0.75  # 0..1, the reference's default
    top_k: int = 0  # 0 keeps every token
    seed: int | None = None  # equal seeds give equal answers in any batch; None draws a new seed

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "top_k", "seed"):
            value = getattr(self, name)
            if not isinstance(value, int) and not (name == "seed" and value is None):
                raise ValueError(f"{name} must be a whole number, got {value!r}")
        for name in ("temperature", "top_p"):
            if not isinstance(getattr(self, name), (int, float)):
                raise ValueError(f"{name} must be a number, got {getattr(self, name)!r}")
        if self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens must be at least 0, got {self.max_new_tokens}")
        if not self.temperature < float("inf"):
            raise ValueError(f"temperature must be a finite number, got {self.temperature}")
        if not 0.0 <= self.top_p <= 1.0:
            raise ValueError(f"top_p must lie in 0..1, got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be at least 0 (0 keeps every token), got {self.top_k}")

    @property
    def greedy(self) -> bool:
        """Whether the best token is taken without a random draw."""
        return self.temperature < 1e-6
