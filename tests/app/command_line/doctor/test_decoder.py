"""The doctor opens an exported decoder, asks it a question, and names its faults."""

import shutil
from pathlib import Path

from llama_adapter.app.command_line.doctor.decoder import diagnose_decoder
from llama_adapter.app.models.spec import CaptionerSpec
from tests.app.exported import exported_embedded, exported_golden


def told(folder: str) -> list[tuple[str, str]]:
    return [(finding.level, finding.what) for finding in diagnose_decoder(CaptionerSpec(decoder=folder))]


def test_a_whole_decoder_answers() -> None:
    findings = diagnose_decoder(CaptionerSpec(decoder=exported_embedded()))

    assert [finding.level for finding in findings] == ["ok", "ok", "ok"]
    assert "'a small yellow moon above a small green cross'" in findings[-1].sentence


def test_faults_are_findings(tmp_path: Path) -> None:
    folder = tmp_path / "exported"
    shutil.copytree(exported_embedded(), folder)
    (folder / "decoder.weights").write_bytes(b"0")

    assert told(str(folder)) == [("error", "decoder")]
    assert told(str(tmp_path / "missing")) == [("error", "decoder")]
    assert told(exported_golden("BIAS-TINY")) == [("ok", "decoder"), ("error", "decoder")]
