"""InferSession since 2024: path, device, feeds and mode are checked first."""

from typing import Any

from ais_bench_session import MODES, Session

from ais_bench.infer.interface_check import check_device_range_valid, check_feeds, check_model_path_legality


class InferSession(Session):
    def __init__(
        self, device_id: int, model_path: str, acl_json_path: str | None = None, debug: bool = False, loop: int = 1
    ) -> None:
        check_model_path_legality(model_path)
        check_device_range_valid(device_id)
        super().__init__(device_id, model_path, acl_json_path, debug, loop)

    def set_context(self) -> None:
        self.session.set_context()

    def infer(self, feeds: Any, mode: str = "static", custom_sizes: Any = 100000, out_array: bool = True) -> Any:
        check_feeds(feeds)
        if mode not in MODES:
            raise ValueError("infer mode is illegal, Please check.")
        return super().infer(feeds, mode, custom_sizes, out_array)
