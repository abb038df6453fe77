"""Record ids are equal for equal work, and do not change between versions."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from llama_adapter.app.captioning.tasks.choose import OneOf
from llama_adapter.app.captioning.tasks.question import Question
from llama_adapter.app.jobs.job import Job
from llama_adapter.app.jobs.job_planner import JobPlanner
from llama_adapter.app.jobs.records.key import RecordKey
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.pictures.inputs import InputSpec, PictureInput
from llama_adapter.llm.engine.sampling_params import SamplingParams
from tests.app.toys import INFO


@pytest.mark.parametrize(
    ("record_id", "given"),
    [
        ("9ed16f15c5c18dfea69fb648b523a7a1", {}),
        ("9a789bee2ef8b676b246ddef11e521d8", {"question": Question(instruction="Is é it {stem}?")}),
        ("ed9e163e8177bb502680a5e5d47e8689", {"question": Question(instruction="Look", input="closely")}),
        ("e1481443e929312fd0bf7ca6e5127e7a", {"question": Question(raw="A picture of")}),
        ("e5ab80661ac220f5da864d1381afd07d", {"question": Question(instruction="Is it?", task=OneOf(("yes", "no")))}),
        ("78c63e6587f84d1435685e6129c5676b", {"sampling": SamplingParams(temperature=0.5, top_p=0.9, top_k=4, seed=7)}),
        ("ac63f72ee9fc539abb8edde21186dfd0", {"info": replace(INFO, precision="int8")}),
        ("442bce640844b7d4e852330f0a7c95e9", {"info": replace(INFO, encoder="ef" * 8, vision="onnx")}),
        (
            "206ccd2ed2b682f775119f701e49aad0",
            {"spec": CaptionerSpec(reading="fast", exif="ignore", channel_order="bgr")},
        ),
        ("d6e01b1b042ab60e84fdf99f1f56d4df", {"digest": "", "label": "été/\udcff.png"}),
    ],
    ids=["caption", "ask", "input", "raw", "choose", "sampled", "int8", "encoder", "fast", "no bytes"],
)
def test_ids_are_those_of_earlier_versions(record_id: str, given: dict[str, Any]) -> None:
    usual = {"question": Question(), "spec": CaptionerSpec(batch_size=8), "info": INFO, "sampling": SamplingParams()}
    of = SimpleNamespace(**{**usual, "digest": "cd" * 32, "label": "a.png", **given})
    job = Job(spec=of.spec, inputs=InputSpec(), questions=(of.question,), sampling=of.sampling)

    work, _ = JobPlanner(job, spec=of.spec, info=of.info).item(PictureInput(source="a.png", label=of.label))

    key: RecordKey = work.questions[0].tag.key
    assert key.id(of.digest) == record_id


def test_an_id_depends_on_everything_in_its_key_but_the_order_of_settings_and_the_name_of_a_readable_picture() -> None:
    key = RecordKey(picture="a.png", prompt="What?", model_digest="model", settings={"seed": None, "temperature": 0.0})
    same = [key, replace(key, settings=dict(reversed(key.settings.items()))), replace(key, picture="b.png")]
    others = [
        replace(key, prompt="What else?"),
        replace(key, model_digest="other"),
        replace(key, settings={**key.settings, "temperature": 0.5}),
    ]

    assert len({one.id("ab") for one in same}) == 1
    assert len({one.id("ab") for one in [key, *others]} | {key.id("cd")}) == 5
    assert key.id("") != replace(key, picture="b.png").id("")
