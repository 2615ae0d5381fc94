"""The three training regimes, and a run of phases on different parts of the data."""

import pytest
from programs import Program, assert_as_uninterrupted, metrics_of, state_of

from compmod_jax.training.experiment import load_config
from compmod_jax.training.regimes import REGIMES, iterative, joint, sequential


def test_joint_training_is_one_phase_of_everything_on_all_data():
  (phase,) = joint()
  assert (phase.part, phase.trainable, phase.epochs) == ("all", "all", 15)


def test_sequential_training_freezes_the_routers_and_then_the_rest():
  found = [(phase.part, phase.trainable, phase.epochs) for phase in sequential()]
  assert found == [("large", "rest", 15), ("small", "routing", 5)]
  assert [phase.epochs for phase in sequential(6, 1)] == [6, 1]


def test_iterative_training_takes_turns_for_thirty_epochs():
  phases = iterative()
  assert sum(phase.epochs for phase in phases) == len(phases) == 30
  found = [(phase.part, phase.trainable) for phase in phases]
  assert found == [("large", "rest"), ("small", "routing")] * 15


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("name", ["grammar", "iwslt14"])
def test_every_translation_configuration_has_the_regimes_as_variants(name, regime):
  found = load_config(f"configs/nmt_cah.py:{name}-{regime}")
  assert found.phases == REGIMES[regime](15)
  assert (found.evaluate_every, found.score_train) == (0, True)


# A run. Four phases; the first and the third go through the large part, epoch after epoch.

OPTIONS = tuple(
  f"--config.{name}"
  for name in ("log_every=4", "evaluate_every=0", "evaluate_sentences=20", "checkpoint_every=6")
)


@pytest.fixture(scope="module")
def turns(place):
  """A finished run by turns."""
  workdir = place.root / "turns"

  def make():
    with Program(place, workdir, *OPTIONS, variant="turns") as program:
      program.finish(0)
      (place.root / "turns.log").write_text(program.text)

  place.once("turns", make)
  return workdir


# 300 pairs: 279 in the large part and 21 in the small one make 24 and 2 batches of 12 rows.
ENDS = (24, 26, 50, 52)


def test_epochs_end_in_lines_and_evaluations(turns):
  train = metrics_of(turns, "train")
  assert {line["step"]: line["epoch"] for line in train if line["step"] in ENDS} == {
    step: float(epoch) for epoch, step in enumerate(ENDS, 1)
  }
  assert [line["phase"] for line in train if line["step"] in ENDS] == ["rest", "routing"] * 2
  evaluated = metrics_of(turns, "eval")
  assert [(line["step"], line["epoch"]) for line in evaluated] == [
    (step, float(epoch)) for epoch, step in enumerate(ENDS, 1)
  ]


@pytest.mark.programs
def test_phases_with_the_same_parameters_share_their_program(turns, place):
  assert (place.root / "turns.log").read_text().count("compiling the step") <= 2
  counts = {line["step"]: line["compilations"] for line in metrics_of(turns, "train")}
  assert counts[52] == counts[32]  # nothing is compiled in the second round


def test_every_phase_is_announced(turns, place):
  shown = (place.root / "turns.log").read_text()
  assert (
    "phase 2 of 4, routing: the routers train on the small part of the training data,"
    " 2 batches an epoch, up to step 26\n"
  ) in shown
  assert shown.count("\nphase ") == 4


def test_routers_and_the_rest_move_by_turns_and_each_counts_its_own_updates(turns):
  states = {step: state_of(turns, step) for step in ENDS}

  def moved(old, new):
    changed = (p for p in states[old] if states[old][p].tobytes() != states[new][p].tobytes())
    return {path for path in changed if path.startswith(("params/", "opt_state/1/"))}

  assert all("/router/" in path or path.endswith("count/routing") for path in moved(24, 26))
  assert not any("/router/" in path or path.endswith("count/routing") for path in moved(26, 50))
  counts = [
    [int(s[f"opt_state/1/count/{g}"]) for g in ("rest", "routing")] for s in states.values()
  ]
  assert counts == [[24, 0], [24, 2], [48, 2], [48, 4]]
  assert [int(s["opt_state/3/count"]) for s in states.values()] == list(ENDS)  # of the schedule


def test_the_training_split_is_scored_whole_where_that_is_asked_for(turns):
  final = {line["split"]: line for line in metrics_of(turns, "final")}
  assert final["train"]["sentences"] == 300
  assert final["train"]["perplexity"] > 1
  assert "bleu" not in final["train"]


@pytest.mark.slow
def test_a_run_by_turns_is_continued_inside_a_phase_as_if_nothing_had_happened(
  place, turns, tmp_path
):
  workdir = place.stopped_at(30, tmp_path / "run", turns)
  with Program(place, workdir, *OPTIONS, variant="turns") as program:
    program.trained()
  assert_as_uninterrupted(workdir, turns)
  assert metrics_of(workdir, "heads") == metrics_of(turns, "heads")


def test_the_heads_are_watched_at_every_evaluation(turns):
  watched = metrics_of(turns, "heads")
  assert [line["step"] for line in watched] == list(ENDS)
  for line in watched:
    assert line["sentences"] == 64
    found = line["sites"]["encoder/layer_0/self"]
    assert [len(row) for row in found["weight"]] == [2] * 5
    assert sum(found["weight"][0]) == pytest.approx(1, abs=1e-3)
    assert "norm_scaled" not in line["sites"]["decoder/layer_0/cross"]
