"""InferSession since 2024: the path is checked first."""

from ais_bench_session import Session

from ais_bench.infer.interface_check import check_model_path_legality


class InferSession(Session):
    def __init__(self, device_id: int, model_path: str) -> None:
        check_model_path_legality(model_path)
        super().__init__(device_id, model_path)

    def set_context(self) -> None:
        self.session.set_context()
