"""The pictures hold the data that they were given."""

import math
import subprocess
import sys
from xml.etree import ElementTree

import numpy as np
import pytest

from compmod_jax.analysis.report import plot, style
from compmod_jax.core.errors import UserError

SITES = ("encoder/layer_0/self", "encoder/layer_1/self")
HEADS = 4


def records(sites=SITES, evaluations=(20, 40)):
  lines = [{"kind": "start"}]
  for step in range(10, 50, 10):
    record = {"kind": "train", "step": step, "loss": 8 / step, "perplexity": math.exp(8 / step)}
    record |= {"learning_rate": step * 1e-5, "gradient_norm": 1 + 1 / step}
    for site in sites:
      record[f"router/{site}/entropy"] = 1.3 - step / 1000
      for head in range(HEADS):
        record[f"router/{site}/weight_{head}"] = 0.25 + (head - 1.5) * step / 1000
        record[f"router/{site}/wins_{head}"] = 0.25 + (head - 1.5) * step / 300
    lines.append(record)
  for step in evaluations:
    scores = {"loss": 9 / step, "perplexity": math.exp(9 / step), "bleu": float(step)}
    lines.append({"kind": "eval", "split": "valid", "step": step, **scores})
  return lines


def by_label(axes):
  return {line.get_label(): line for line in axes.get_lines()}


def by_title(figure):
  return {axes.get_title(loc="left"): axes for axes in figure.axes}


def test_the_training_curves_are_the_logged_numbers():
  panels = by_title(plot.training_curves(records(), best_step=40))
  assert set(panels) == {"Loss", "Perplexity", "Score on valid", "Learning rate", "Gradient norm"}
  loss = by_label(panels["Loss"])
  np.testing.assert_array_equal(loss["train"].get_xdata(), [10, 20, 30, 40])
  np.testing.assert_array_equal(loss["train"].get_ydata(), [0.8, 0.4, 8 / 30, 0.2])
  np.testing.assert_array_equal(loss["valid"].get_ydata(), [0.45, 0.225])
  np.testing.assert_array_equal(by_label(panels["Score on valid"])["BLEU"].get_ydata(), [20, 40])
  assert panels["Perplexity"].get_yscale() == "log"
  for axes in panels.values():
    assert axes.get_xlabel() == "step"
    assert axes.get_ylabel()
    assert any(list(line.get_xdata()) == [40, 40] for line in axes.get_lines()), "the best step"


def test_a_resumed_run_is_drawn_without_going_back():
  log = [*records(), {"kind": "train", "step": 20, "loss": 7.0}]
  steps, losses = plot.series(log, "loss", "train")
  np.testing.assert_array_equal(steps, [10, 20, 30, 40])
  assert losses[1] == 7.0


def test_a_loss_that_is_not_finite_leaves_a_gap():
  log = [{"kind": "train", "step": step, "loss": loss} for step, loss in ((1, 2.0), (2, None))]
  line = by_label(by_title(plot.training_curves(log))["Loss"])["train"]
  np.testing.assert_array_equal(line.get_ydata(), [2.0, np.nan])


@pytest.mark.parametrize(
  "figure",
  [
    lambda: plot.training_curves([]),
    lambda: plot.training_curves([{"kind": "start"}, {"kind": "train", "step": 1, "loss": None}]),
    lambda: plot.router_curves([]),
    lambda: plot.head_weights({}),
    lambda: plot.head_weights_by_position({}),
  ],
)
def test_a_picture_of_nothing_says_so(figure, tmp_path):
  drawn = figure()
  assert not drawn.axes
  assert any(text.get_text().startswith("No ") for text in drawn.texts)
  plot.save(drawn, tmp_path, "nothing")


def test_the_bars_are_the_mean_weights_with_the_uniform_line():
  weights = {"encoder/layer_0/self": [0.1, 0.2, 0.3, 0.4], "encoder/layer_1/self": [0.5, 0.5]}
  panels = by_title(plot.head_weights(weights))
  for number, (site, expected) in enumerate(weights.items()):
    axes = panels[f"encoder self, layer {number}"]
    np.testing.assert_allclose([bar.get_height() for bar in axes.patches], expected, err_msg=site)
    assert list(axes.get_lines()[0].get_ydata()) == [1 / len(expected)] * 2


def test_the_heat_map_shows_the_first_twelve_positions_against_the_fair_share():
  weights = np.random.default_rng(0).dirichlet(np.ones(HEADS), size=20)
  weights[11] = np.nan
  axes = plot.head_weights_by_position({SITES[0]: weights}).axes[0]
  cells = np.ma.filled(axes.collections[0].get_array(), np.nan)
  np.testing.assert_allclose(cells, weights[:12].T - 1 / HEADS)
  with pytest.raises(UserError, match=r"encoder/layer_0/self.*\(4,\).*\[positions, heads\]"):
    plot.head_weights_by_position({SITES[0]: weights[0]})


def test_experts_are_not_called_heads():
  mixed = {"encoder/layer_0/self": [0.5, 0.5], "encoder/layer_0/ffn": [0.2, 0.3, 0.5]}
  figure = plot.head_weights(mixed)
  assert "each head or expert" in figure.get_suptitle()
  assert [axes.get_xlabel() for axes in by_title(figure).values()] == ["head", "expert"]
  curves = plot.router_curves(records(["decoder/layer_0/ffn"]), "wins")
  assert "each expert wins" in curves.get_suptitle()


@pytest.mark.parametrize("statistic", ["weight", "wins"])
def test_the_router_curves_have_a_line_for_every_head(statistic):
  log = records(sites=[*SITES, "encoder/layer_10/self"])
  figure = plot.router_curves(log, statistic)
  titles = [axes.get_title(loc="left") for axes in figure.axes]
  assert titles == [f"encoder self, layer {layer}" for layer in (0, 1, 10)]
  for axes in figure.axes:
    lines = by_label(axes)
    for head in range(HEADS):
      expected = [r[f"router/{SITES[0]}/{statistic}_{head}"] for r in log if r["kind"] == "train"]
      np.testing.assert_array_equal(lines[str(head)].get_ydata(), expected)
    assert {"0", "1", "2", "3"} <= {text.get_text() for text in axes.texts}
    assert any(list(line.get_ydata()) == [0.25, 0.25] for line in axes.get_lines())


def test_the_entropy_is_shown_against_that_of_uniform_weights():
  axes = plot.router_curves(records(), "entropy").axes[0]
  curve, uniform = axes.get_lines()
  np.testing.assert_array_equal(
    curve.get_ydata(), [1.3 - step / 1000 for step in range(10, 50, 10)]
  )
  assert list(uniform.get_ydata()) == [math.log(HEADS)] * 2
  with pytest.raises(UserError, match="entropy"):
    plot.router_curves(records(), "entropie")  # pyright: ignore[reportArgumentType]


def test_names_of_lines_do_not_overlap():
  figure = plot.head_weights({"a": [1.0]})
  axes = figure.axes[0]
  for number in range(6):
    style.line(
      axes, np.array([0, 1]), np.array([0.0, 0.5 + number / 1e4]), f"line {number}", number
    )
  style.name_lines(axes)
  heights = sorted(text.xy[1] for text in axes.texts if text.get_text().startswith("line"))
  assert len(heights) == 6
  assert min(np.diff(heights)) > 0.09
  assert 0 <= heights[0] <= heights[-1] <= 1


def test_sites_are_drawn_as_a_sentence_passes_them():
  sites = ["decoder/layer_0/cross", "decoder/layer_0/self", "encoder/layer_10/self"]
  sites += ["encoder/layer_2/self/router"]
  _, panels = style.small_multiples(sites, 2.0)
  assert list(panels) == [sites[3], sites[2], sites[1], sites[0]]
  assert style.site_title(sites[3]) == "encoder self, layer 2"


def test_saving_twice_gives_the_same_bytes(tmp_path):
  files = [
    plot.save(plot.training_curves(records()), tmp_path / name, "training") for name in ("a", "b")
  ]
  assert [path.suffix for path in files[0]] == [".png", ".svg"]
  assert files[0][0].read_bytes().startswith(b"\x89PNG")
  ElementTree.fromstring(files[0][1].read_text())
  for first, second in zip(*files, strict=True):
    assert first.read_bytes() == second.read_bytes()


def test_a_title_that_is_wider_than_its_figure_has_several_lines():
  figure = style.canvas(4.0, 2.0)
  style.finish(figure, "Mean weight of each head by tenth of the norm of its output")
  box = figure.get_suptitle(), figure._suptitle.get_window_extent()
  assert "\n" in box[0]
  assert box[1].x1 <= figure.bbox.x1


def test_pictures_leave_pyplot_alone():
  code = (
    "import sys; from compmod_jax.analysis.report import plot; plot.head_weights({'a': [1.0]});"
    "assert 'matplotlib.pyplot' not in sys.modules"
  )
  subprocess.run([sys.executable, "-c", code], check=True)
