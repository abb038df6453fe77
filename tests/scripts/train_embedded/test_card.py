"""The embedded model's card: its tables are those of the figures, and say which model they are about."""

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.train_embedded.ablation import count_weights
from scripts.train_embedded.card import PARTS, fill, main
from scripts.train_embedded.results import DOCS, PLACE, read
from scripts.train_embedded.sizes import build_decoder, build_encoder

BUNDLE = DOCS.parent / "assets" / "embedded"
EMPTY = "".join(f"# {name}\n<!-- part: {name} -->\n<!-- end -->\n" for name in PARTS)
FINISHED = {"steps": 4700, "num_steps": 4700, "minutes": 5.04}


def scored(caption: float, **changed: object) -> dict[str, Any]:
    shares = {"caption": caption, "count": 100.0}
    asked = {"seed": 2, "asked": {"caption": 2000, "count": 714}}
    return (
        asked
        | {"scores": shares, "never_drawn_pairs": shares, "shuffled_pictures": shares}
        | {"most_frequent_answer": shares, **changed}
    )


def arm(caption: float) -> dict[str, Any]:
    return {
        "arm": "any",
        "trained": "nothing | more",
        "weights": {"visual_blocks": 34, "adapter": 1200, "llama": 0, "all_trained": 1234, "all": 5229394},
        "scores": {"caption": caption, "count": 50.0},
        "never_drawn_pairs": {"caption": 20.0, "count": 30.0},
    }


def test_the_page_in_the_repository_is_that_of_its_figures() -> None:
    page = (DOCS / "embedded-model.md").read_text(encoding="utf-8")
    content = read(PLACE)

    assert fill(page, content) == page
    assert any(content.get(name) for name in PARTS)


def test_the_scores_on_the_page_are_those_of_the_model_in_the_repository() -> None:
    page = (DOCS / "embedded-model.md").read_text(encoding="utf-8")
    result = read(PLACE)["scores"]["float32"]

    assert result["model"] == json.loads((BUNDLE / "manifest.json").read_text(encoding="utf-8"))["digest"]
    assert f"begins with {result['model'][:12]}" in page
    assert f"scripts.train_embedded.score --pictures {result['pictures']} --seed {result['seed']}" in page


def test_the_scores_of_one_type_are_exact_matches_and_those_of_two_stand_beside_each_other() -> None:
    one = fill(EMPTY, {"scores": {"float32": scored(99.8)}})
    two = fill(EMPTY, {"scores": {"int8": scored(97.04), "float32": scored(99.8)}})

    assert "| task | asked | exact match | never-drawn pairs | shuffled pictures |" in one
    assert "| caption | 2000 | 99.8 | 99.8 | 99.8 | 99.8 |\n| count | 714 | 100.0 |" in one
    assert "| float32 | int8 | never-drawn pairs, float32 | never-drawn pairs, int8 | shuffled" in two
    assert "| caption | 2000 | 99.8 | 97.0 | 99.8 | 97.0 | 99.8 | 99.8 |" in two


def test_types_that_were_asked_other_questions_are_not_compared() -> None:
    with pytest.raises(ValueError, match="int8 and float32 were not asked the same, `seed` differs"):
        fill(EMPTY, {"scores": {"float32": scored(99.8), "int8": scored(99.8, seed=3)}})


def test_stages_are_told_in_the_order_of_the_training_and_arms_in_their_own_table() -> None:
    half = FINISHED | {"steps": 1200}
    page = fill(EMPTY, {"training": {"text": half, "code": half, "ablation-lora": FINISHED, "vision": FINISHED}})

    assert "| vision | 4,700 | 5.0 |\n| code | 1,200 of 4,700 | 5.0 |\n| text | 1,200 of 4,700 | 5.0 |\n\n" in page


def test_arms_say_what_was_trained_and_are_compared_task_by_task() -> None:
    arms = {"ablation-frozen": arm(40.0), "ablation-opened": arm(98.0)}
    page = fill(EMPTY, {"ablation": arms, "training": dict.fromkeys(arms, FINISHED)})

    row = "| frozen | nothing \\| more | visual blocks 34, adapter 1,200 | 1,234 of 5,229,394 | 4,700 | 5.0 |"
    assert row in page
    assert "| task | frozen | frozen, never-drawn pairs | opened | opened, never-drawn pairs |" in page
    assert "| caption | 40.0 | 20.0 | 98.0 | 20.0 |" in page
    assert "| mean | 45.0 | 25.0 | 74.0 | 25.0 |" in page


def test_what_an_arm_counts_of_its_weights_is_what_the_page_tells() -> None:
    weights = count_weights(build_encoder(), build_decoder())
    arms = {"ablation-opened": arm(98.0) | {"weights": weights}}
    page = fill(EMPTY, {"ablation": arms, "training": dict.fromkeys(arms, FINISHED)})

    assert f"adapter {weights['adapter']:,}" in page
    assert f"| {weights['all_trained']:,} of {weights['all']:,} |" in page
    assert "all trained" not in page


def test_any_table_of_heads_and_rows_is_one_of_the_familiar() -> None:
    page = fill(EMPTY, {"familiar": {"heads": ["kind", "AUC"], "rows": [["a|b", 0.9876], ["photographs", 40]]}})

    assert "| kind | AUC |\n| --- | --- |\n| a\\|b | 0.9876 |\n| photographs | 40 |\n" in page
    with pytest.raises(ValueError, match="Wanted 2 cells"):
        fill(EMPTY, {"familiar": {"heads": ["kind", "AUC"], "rows": [["photographs"]]}})


def test_a_part_without_figures_is_left_as_it_is_and_text_around_stays() -> None:
    page = EMPTY.replace("<!-- part: training -->\n", "<!-- part: training -->\nby hand\n")

    assert fill(page, {}) == page
    filled = fill(page, {"scores": {"float32": scored(99.8)}})
    assert "<!-- part: training -->\nby hand\n<!-- end -->" in filled
    assert fill(filled, {"scores": {"float32": scored(99.8)}}) == filled


@pytest.mark.parametrize(
    ("page", "told"),
    [
        (EMPTY.replace("<!-- part: scores -->\n", ""), "beginnings and 5 ends"),
        (EMPTY.replace("<!-- end -->\n", "", 1), "5 beginnings and 4 ends"),
        (EMPTY.replace("<!-- part: scores -->\n<!-- end -->\n", ""), "page has no `<!-- part: scores -->`"),
        (EMPTY.replace("part: training", "part: trainings"), "got trainings"),
        (EMPTY + EMPTY, "once, got scores, training"),
    ],
)
def test_a_page_whose_marks_are_not_whole_is_refused(page: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        fill(page, {"scores": {"float32": scored(99.8)}})


def test_a_figure_that_is_missing_is_named() -> None:
    lacking = scored(99.8)
    del lacking["never_drawn_pairs"]
    with pytest.raises(ValueError, match=r"no `scores\.float32\.never_drawn_pairs`"):
        fill(EMPTY, {"scores": {"float32": lacking}})


def test_scores_are_put_in_from_their_files_and_the_page_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures, page, result = (tmp_path / name for name in ("figures.json", "page.md", "result.json"))
    page.write_text(EMPTY)
    result.write_text(json.dumps(scored(99.8)))
    table = tmp_path / "table.json"
    table.write_text('{"heads": ["kind"], "rows": [["photographs"]]}')
    common = ["--figures", str(figures), "--page", str(page)]

    assert main([*common, "--scores", f"float32={result}", "--familiar", str(table)]) == 0

    assert read(figures)["scores"]["float32"] == scored(99.8)
    assert page.read_text() == fill(EMPTY, read(figures))
    assert "| photographs |" in page.read_text()
    with pytest.raises(SystemExit):
        main([*common, "--scores", f"int4={result}"])
    assert "--scores takes float32, int8 or ablation-NAME, got `int4`" in capsys.readouterr().err
    with pytest.raises(SystemExit):  # an arm of which nothing else is known
        main([*common, "--scores", f"ablation-lora={result}"])
    assert "no `ablation.ablation-lora.trained`" in capsys.readouterr().err


def test_variants_stand_beside_each_other_and_not_among_the_stages() -> None:
    variants = {"code-as-it-is": {"caption": 0.984, "pair-caption": 0.5}, "code-without-words": {"caption": 0.1}}
    training = {"code": FINISHED, "code-as-it-is": FINISHED}
    with pytest.raises(ValueError, match=r"variants\.code-without-words\.pair-caption"):
        fill(EMPTY, {"variants": variants})
    variants["code-without-words"]["pair-caption"] = 0.004

    page = fill(EMPTY, {"variants": variants, "training": training})

    assert "| task | as it is | without words |" in page
    assert "| caption | 98.4 | 10.0 |\n| never-drawn pairs: caption | 50.0 | 0.4 |" in page
    assert page.count("| code") == 1
