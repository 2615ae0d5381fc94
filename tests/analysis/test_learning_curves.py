"""Learning curves of several runs: their numbers, epoch by epoch."""

import json

import numpy as np
import pytest

from compmod_jax.analysis import learning_curves
from compmod_jax.analysis.report.training import write_report
from compmod_jax.commands import curves
from compmod_jax.core.errors import UserError


def records(phases: tuple[str, ...] = (), batches: tuple[int, ...] = (5, 5)) -> list[dict]:
  """Lines every two steps and at the end of every epoch; the loss of a line is its step."""
  lines, step = [], 0
  for epoch, count in enumerate(batches):
    for within in range(1, count + 1):
      step += 1
      if within % 2 == 0 or within == count:
        line = {"kind": "train", "step": step, "epoch": round(epoch + within / count, 4)}
        line |= {"loss": float(step), "gradient_norm": 1 / step, "learning_rate": step * 1e-4}
        lines.append(line | ({"phase": phases[epoch]} if phases else {}))
    score = {"loss": 9.0 - epoch, "perplexity": np.exp(9.0 - epoch), "bleu": 10.0 * epoch}
    lines.append({"kind": "eval", "split": "valid", "step": step, **score})
  return lines


def lines_of(axes) -> dict[str, tuple[list, list]]:
  return {
    str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata()))
    for line in axes.get_lines()
  }


def marks(axes) -> list[float]:
  """Where vertical lines stand."""
  found = [list(line.get_xdata()) for line in axes.get_lines()]
  return [x[0] for x in found if len(x) == 2 and x[0] == x[1]]


def test_the_mean_of_an_epoch_weighs_lines_by_their_steps():
  found, means = learning_curves.epoch_means(records(), "loss")
  np.testing.assert_array_equal(found, [1, 2])
  # Lines at steps 2, 4, 5 are about 2, 2 and 1 steps; then 7, 9, 10.
  np.testing.assert_allclose(means, [(2 * 2 + 2 * 4 + 5) / 5, (2 * 7 + 2 * 9 + 10) / 5])


def test_an_epoch_that_was_cut_short_or_shared_ends_where_it_was_left():
  log = [line for line in records() if line["step"] <= 7]
  np.testing.assert_allclose(learning_curves.epoch_means(log, "loss")[0], [1, 1.4])
  for line in log:
    line["phase"] = "rest" if line["step"] <= 2 else "routing"
  found, means = learning_curves.epoch_means(log, "loss")
  np.testing.assert_allclose(found, [0.4, 1, 1.4])
  np.testing.assert_allclose(means, [2, (2 * 4 + 5) / 3, 7])


def test_a_line_that_lacks_the_quantity_is_left_out():
  log = records()
  del log[1]["loss"]
  np.testing.assert_allclose(learning_curves.epoch_means(log, "loss")[1][0], (2 * 2 + 5) / 3)


def test_every_run_has_a_column_of_its_loss_perplexity_and_score():
  runs = {"joint": records(), "sequential": records(("rest", "routing"), (5, 2))}
  figure = learning_curves.learning_curves(runs)
  assert len(figure.axes) == 6
  titles = [axes.get_title(loc="left") for axes in figure.axes]
  assert titles[:2] == ["joint: loss", "sequential: loss"]
  assert titles[4:] == ["BLEU on valid"] * 2
  loss, perplexity, score = (lines_of(figure.axes[row]) for row in (0, 2, 4))
  assert loss["valid"] == ([1.0, 2.0], [9.0, 8.0])
  np.testing.assert_allclose(loss["train"][1], [3.4, 8.4])
  np.testing.assert_allclose(perplexity["train"][1], np.exp([3.4, 8.4]))
  assert score["valid"] == ([1.0, 2.0], [0.0, 10.0])
  assert figure.axes[0].get_ylim() == figure.axes[1].get_ylim()  # one scale along a row
  assert marks(figure.axes[0]) == []
  assert marks(figure.axes[1]) == [1.0]  # where the second phase begins


def test_many_turns_are_not_marked():
  turns = records(("rest", "routing") * 4, (3, 2) * 4)
  assert marks(learning_curves.learning_curves({"a": turns}).axes[0]) == []


def test_gradient_norm_and_learning_rate_are_the_logged_numbers_by_step():
  figure = learning_curves.gradient_curves({"a": records(("rest", "routing")), "b": records()})
  norm, rate = (next(iter(lines_of(figure.axes[row]).values())) for row in (0, 2))
  np.testing.assert_allclose(norm[1], [1 / step for step in (2, 4, 5, 7, 9, 10)])
  np.testing.assert_allclose(rate[1], [step * 1e-4 for step in (2, 4, 5, 7, 9, 10)])
  assert marks(figure.axes[0]) == [5]


def test_no_run_is_cut_off_by_the_scale_of_another():
  large = [{k: 50 * v if k == "gradient_norm" else v for k, v in r.items()} for r in records()]
  for line in large:
    line["bleu"] = 90.0
  runs = {"small": records(), "large": large}
  norm, score = (
    learning_curves.gradient_curves(runs).axes[0],
    learning_curves.learning_curves(runs).axes[4],
  )
  assert norm.get_ylim()[0] == score.get_ylim()[0] == 0
  assert norm.get_ylim()[1] > 50 / 2
  assert score.get_ylim()[1] > 90


@pytest.mark.parametrize("draw", [learning_curves.learning_curves, learning_curves.gradient_curves])
def test_a_picture_of_nothing_says_so(draw):
  figure = draw({"a": [{"kind": "start"}]})
  assert not figure.axes
  assert any(text.get_text().startswith("No ") for text in figure.texts)


def test_the_report_of_a_run_of_several_phases_shows_its_epochs(tmp_path):
  results = {"name": "run", "splits": [{"split": "test", "loss": 1.0}]}
  log = records(("rest", "routing"))
  report = write_report(tmp_path, results, records=log)  # pyright: ignore[reportArgumentType]
  assert "learning_curves" in {path.stem for path in report.pictures}


# The program.


def workdir(folder, name: str, log: list[dict]):
  (folder / name).mkdir()
  (folder / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
  return folder / name


def test_the_program_draws_runs_under_their_names(tmp_path, capsys):
  one, two = workdir(tmp_path, "one", records()), workdir(tmp_path, "two", records())
  curves.main(["--runs", f"first={one}", str(two), "--output", str(tmp_path / "out")])
  written = capsys.readouterr().out.split()
  assert [path.rsplit("/", 1)[1] for path in written] == [
    "learning_curves.png", "learning_curves.svg", "gradient_curves.png", "gradient_curves.svg",
  ]  # fmt: skip
  text = (tmp_path / "out" / "learning_curves.svg").read_text()
  assert "first: loss" in text
  assert "two: loss" in text


def test_what_cannot_be_drawn_is_told(tmp_path):
  one = workdir(tmp_path, "one", records())
  with pytest.raises(UserError, match=r"two runs 'one'.*NAME=WORKDIR"):
    curves.main(["--runs", str(one), f"one={one}"])
  with pytest.raises(UserError, match=r"metrics.jsonl holds no records"):
    curves.main(["--runs", str(tmp_path / "nowhere")])
