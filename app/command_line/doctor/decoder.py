"""Checks an exported decoder before use: whether its folder is complete, its graphs open, and it answers."""

from contextlib import closing

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.command_line.doctor.findings import Finding, Report
from llama_adapter.app.models.exported import read_exported_model
from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.app.models.spec import CaptionerSpec

_WHAT = "decoder"
_NUM_TOKENS = 24  # maximum length of the test answer


def diagnose_decoder(spec: CaptionerSpec) -> list[Finding]:
    """Check the folder `spec.decoder` and its picture encoder. Faults are returned as findings, never raised."""
    assert spec.decoder is not None, "the caller asks"
    report, folder = Report(), spec.decoder
    exported = report.attempt(_WHAT, lambda: read_exported_model(folder))
    if exported is None:
        return report.findings
    card = exported.card
    report.add(
        "ok",
        _WHAT,
        f"The {len(card.files)} files in `{folder}` are those of the export: {card.name} as {card.format}, "
        f"{card.dtype} with {card.precision} weights, and a context of {card.config.context} tokens",
    )
    captioner = report.attempt(_WHAT, lambda: Captioner.from_spec(spec))
    if captioner is None:
        return report.findings
    with closing(captioner):
        has_adapter = captioner.info.sees_pictures
        runs = f"{captioner.info.device} opens the decoder"
        report.add("ok", _WHAT, f"{runs}, and {captioner.info.vision} its picture encoder" if has_adapter else runs)
        if has_adapter:
            picture = sorted(sample_pictures().iterdir())[0]
            answer, subject = captioner.caption(picture, max_new_tokens=_NUM_TOKENS), f"`{picture.name}`"
        else:
            answer, subject = captioner.generate_text("Hello", max_new_tokens=_NUM_TOKENS)[0], "the prompt `Hello`"
    if answer.error is None:
        report.add("ok", "answer", f"It answers {answer.text!r} to {subject}, with {_NUM_TOKENS} tokens at most")
    else:
        report.add("error", "answer", answer.error.message, "export the decoder again, with --precision float32")
    return report.findings
