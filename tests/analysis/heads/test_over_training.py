"""Pictures of heads over training hold the numbers of the log."""

import json

import numpy as np
import pytest

from compmod_jax.analysis.heads import over_training
from compmod_jax.analysis.report import plot, style
from compmod_jax.analysis.report.training import write_report
from compmod_jax.core.errors import UserError

STEPS, HEADS, POSITIONS = (10, 20, 30), 3, 5
ROUTED, PLAIN = "encoder/layer_{}/self", "decoder/layer_{}/cross"


def value(step: int, layer: int, position: int, head: int) -> float:
  return step / 100 + layer + position / 10 + head / 1000


def grid(step: int, layer: int, factor: float = 1.0) -> list[list[float | None]]:
  rows = [
    [factor * value(step, layer, position, head) for head in range(HEADS)]
    for position in range(POSITIONS)
  ]
  return [*rows[:-1], [None] * HEADS] if layer == 1 else rows  # no sentence is so long


def records(routed: bool = True) -> list[dict]:
  lines: list[dict] = [{"kind": "start"}]
  for step in STEPS:
    line: dict = {"kind": "train", "step": step, "loss": 1.0}
    sites = {PLAIN.format(layer): {"first": 1, "norm": grid(step, layer)} for layer in (0, 1)}
    for layer in (0, 1) if routed else ():
      site = ROUTED.format(layer)
      line |= {f"router/{site}/signature_norm_{h}": value(step, layer, 0, h) for h in range(HEADS)}
      sites[site] = {
        "first": 0,
        "weight": grid(step, layer, 0.1),
        "norm": grid(step, layer),
        "norm_scaled": grid(step, layer, 0.5),
      }
    lines += [line, {"kind": "heads", "step": step, "epoch": step / 10, "sites": sites}]
  return lines


def curves(axes) -> dict[str, np.ndarray]:
  """Label -> values of the lines that have a name."""
  return {
    str(line.get_label()): np.asarray(line.get_ydata(), float)
    for line in axes.get_lines()
    if not str(line.get_label()).startswith("_")
  }


def by_title(figure) -> dict[str, list]:
  found: dict[str, list] = {}
  for axes in figure.axes:
    found.setdefault(axes.get_title(loc="left"), []).append(axes)
  return found


def test_the_signature_norms_are_the_logged_numbers():
  panels = by_title(over_training.signature_norms(records()))
  assert set(panels) == {"encoder self, layer 0", "encoder self, layer 1"}
  for layer in (0, 1):
    found = curves(panels[f"encoder self, layer {layer}"][0])
    for head in range(HEADS):
      expected = [value(step, layer, 0, head) for step in STEPS]
      np.testing.assert_array_equal(found[str(head)], expected)


@pytest.mark.parametrize(
  ("figure", "factors"),
  [
    (lambda: over_training.weights_by_position(records(), "encoder self"), [0.1]),
    (lambda: over_training.norms_by_position(records(), "encoder self"), [1.0, 0.5]),
    (lambda: over_training.norms_by_position(records(), "decoder cross"), [1.0]),
  ],
  ids=["weights", "norms before and after", "norms of plain attention"],
)
def test_every_layer_and_position_has_a_panel_with_its_numbers(figure, factors):
  panels = by_title(figure())
  assert len(panels) == 2 * POSITIONS
  for layer in (0, 1):
    for position in range(POSITIONS):
      drawn = panels[f"layer {layer}, token {position + 1}"]
      assert len(drawn) == len(factors)  # rows of a layer follow each other
      for axes, factor in zip(drawn, factors, strict=True):
        for head in range(HEADS):
          expected = [grid(step, layer, factor)[position][head] for step in STEPS]
          found = curves(axes)[str(head)]
          np.testing.assert_array_equal(found, np.array(expected, float))


def test_norms_are_drawn_where_heads_compete_and_everywhere_in_a_plain_model():
  names = [name for name, _, _ in over_training.pictures(records())]
  assert names == ["signature_norms", "weights_encoder_self", "norms_encoder_self"]
  plain = [name for name, _, _ in over_training.pictures(records(routed=False))]
  assert plain == ["norms_decoder_cross"]
  assert list(over_training.pictures([{"kind": "train", "step": 1, "loss": 2.0}])) == []


def test_units_are_named_below_the_panels():
  figure = over_training.weights_by_position(records(), "encoder self")
  (legend,) = figure.legends
  assert [text.get_text() for text in legend.get_texts()] == [f"head {n}" for n in range(HEADS)]
  experts = json.loads(json.dumps(records()).replace("/self", "/ffn"))
  figure = over_training.weights_by_position(experts, "encoder ffn")
  assert figure.legends[0].get_texts()[0].get_text() == "expert 0"


def test_a_place_that_was_not_measured_is_a_mistake():
  with pytest.raises(UserError, match=r"place is 'encoder slef'.*Did you mean 'encoder self'"):
    over_training.norms_by_position(records(), "encoder slef")


def test_the_report_of_a_run_shows_the_pictures_that_apply(tmp_path):
  results = {"name": "run", "splits": [{"split": "test", "loss": 1.0}]}
  report = write_report(tmp_path, results, records=records())  # pyright: ignore[reportArgumentType]
  names = {path.stem for path in report.pictures}
  assert {"signature_norms", "weights_encoder_self", "norms_encoder_self"} <= names
  assert "learning_curves" not in names
  assert "layer 1, token 5" in report.html.read_text()


def test_the_same_log_gives_the_same_bytes(tmp_path):
  for name in ("a", "b"):
    figure = over_training.weights_by_position(records(), "encoder self")
    plot.save(figure, tmp_path / name, "weights")
  for suffix in ("png", "svg"):
    one, two = ((tmp_path / name / f"weights.{suffix}").read_bytes() for name in ("a", "b"))
    assert one == two
  assert style.INK in (tmp_path / "a" / "weights.svg").read_text()
