"""Recipes: what is wrong in one is said in a line that names the setting; rates over the steps."""

from itertools import pairwise
from pathlib import Path

import pytest

from megaspan.errors import UserError
from megaspan.train.recipe import Recipe, Stage

TOP = dict(config="debug", tokenizer="t", corpus="c", dtype="float32", seed=1)
STAGE = dict(
    name="one", attention="dense", learn="backbone", context=8, tokens_per_step=16, steps=10,
    matrix_learning_rate=0.01, learning_rate=0.02,
)  # fmt: skip


def toml(table: dict[str, object]) -> str:
    return "".join(f"{name} = {value!r}\n" for name, value in table.items())


def read(folder: Path, text: str) -> Recipe:
    path = folder / "recipe.toml"
    path.write_text(text)
    return Recipe.read(path)


def refusal(folder: Path, text: str) -> str:
    with pytest.raises(UserError) as caught:
        read(folder, text)
    said = str(caught.value)
    assert str(folder) in said
    return said


def test_every_setting_is_read(tmp_path: Path) -> None:
    recipe = read(
        tmp_path, toml(TOP | {"clip": 2}) + "[[stage]]\n" + toml(STAGE) + "[[stage]]\n" + toml(STAGE)
    )
    assert (recipe.config, recipe.seed, recipe.clip, recipe.save_every) == ("debug", 1, 2, 1000)
    assert recipe.stages == (Stage(**STAGE),) * 2  # type: ignore[arg-type]


def test_the_shipped_recipe_is_valid() -> None:
    assert Recipe.read(Path(__file__).parents[2] / "recipes" / "span-code.toml").config == "span-code"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path, message in [(tmp_path / "none.toml", "does not exist"), (tmp_path, "directory")]:
        with pytest.raises(UserError, match=message):
            Recipe.read(path)
    assert "not valid TOML" in refusal(tmp_path, "seed = = 1")
    (tmp_path / "latin.toml").write_bytes(b"config = '\xe9'")
    with pytest.raises(UserError, match="not valid TOML"):
        Recipe.read(tmp_path / "latin.toml")


@pytest.mark.parametrize("text", [toml(TOP), toml(TOP) + "stage = 3", toml(TOP) + "stage = [1]"])
def test_stages_of_the_wrong_form(tmp_path: Path, text: str) -> None:
    assert "[[stage]]" in refusal(tmp_path, text)


def test_one_stage_table_is_not_a_list(tmp_path: Path) -> None:
    assert "[[stage]]" in refusal(tmp_path, toml(TOP) + "[stage]\n" + toml(STAGE))


@pytest.mark.parametrize("name", [*TOP, *STAGE])
def test_a_missing_setting_is_named(tmp_path: Path, name: str) -> None:
    top, stage = ({key: value for key, value in table.items() if key != name} for table in (TOP, STAGE))
    assert f"lacks the setting '{name}'" in refusal(tmp_path, toml(top) + "[[stage]]\n" + toml(stage))


@pytest.mark.parametrize(("table", "name"), [(TOP, "stages"), (TOP, "sede"), (STAGE, "step")])
def test_an_unknown_setting_is_named(tmp_path: Path, table: dict, name: str) -> None:
    top, stage = (toml(part | ({name: 1} if part is table else {})) for part in (TOP, STAGE))
    assert f"unknown setting '{name}'" in refusal(tmp_path, top + "[[stage]]\n" + stage)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", "'x'"), ("steps", "0"), ("steps", "2.0"), ("steps", "true"), ("context", "1"),
        ("tokens_per_step", "0"), ("tokens_per_step", "12"), ("learning_rate", "-1e-3"),
        ("matrix_learning_rate", "nan"), ("index_learning_rate", "inf"), ("warmup_steps", "-1"),
        ("decay_share", "1.5"), ("final_rate", "-0.1"), ("weight_decay", "[]"), ("index_queries", "0"),
        ("attention", "'flash'"), ("learn", "3"), ("name", "''"), ("name", "1"),
    ],
)  # fmt: skip
def test_a_wrong_value_in_a_stage_is_named(tmp_path: Path, name: str, value: str) -> None:
    stage = {key: setting for key, setting in STAGE.items() if key != name}
    said = refusal(tmp_path, f"{toml(TOP)}[[stage]]\n{toml(stage)}{name} = {value}\n")
    assert f"{name} must be" in said
    assert "stage" in said


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", "-1"), ("seed", "'1'"), ("dtype", "'float16'"), ("clip", "0"), ("balance_rate", "-1"),
        ("save_every", "0"), ("config", "1"), ("corpus", "['a']"),
    ],
)  # fmt: skip
def test_a_wrong_value_in_the_recipe_is_named(tmp_path: Path, name: str, value: str) -> None:
    top = {key: setting for key, setting in TOP.items() if key != name}
    assert f"{name} must be" in refusal(tmp_path, f"{toml(top)}{name} = {value}\n[[stage]]\n{toml(STAGE)}")


def stage(**settings: object) -> Stage:
    return Stage(**{**STAGE, **settings})  # type: ignore[arg-type]


def test_the_rate_rises_stays_and_falls() -> None:
    rates = stage(steps=100, warmup_steps=10, decay_share=0.3, final_rate=0.1)
    shares = [rates.rate(step) for step in range(101)]
    assert shares[:10] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
    assert shares[10:71] == [1.0] * 61
    falls = [before - after for before, after in pairwise(shares[70:])]
    assert falls == pytest.approx([0.9 / 30] * 30)
    assert shares[100] == pytest.approx(0.1)


def test_rates_without_warmup_or_decay() -> None:
    assert {stage(warmup_steps=0, decay_share=0.0).rate(step) for step in range(10)} == {1.0}
    assert stage(warmup_steps=0, decay_share=1.0, final_rate=0.0).rate(5) == pytest.approx(0.5)
    short = stage(steps=1, warmup_steps=0, decay_share=1.0)
    assert short.rate(0) == 1.0
