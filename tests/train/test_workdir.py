"""A workdir goes on with its own configuration and data, or with changes that are told and kept."""

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from programs import (
  STEPS,
  Program,
  checkpoint_folders,
  metrics_of,
  record_of,
  state_of,
  steps_saved,
)

from compmod_jax.checkpoints.model_folder import load_model_folder, save_model_folder
from compmod_jax.core.config import to_json
from compmod_jax.core.errors import UserError
from compmod_jax.training import identity
from compmod_jax.training.experiment import Phase, load_config
from compmod_jax.training.history import NO_BETTER, TIME_UP, History
from compmod_jax.training.loop import Loop
from compmod_jax.training.optimizer import learning_rate
from compmod_jax.training.preemption import Preemption
from compmod_jax.training.run import set_up
from compmod_jax.training.workdir import read_config, saved_experiment, write_config
from compmod_jax.training.writer import Writer

STEP = 24


@pytest.fixture
def run(place, tmp_path, monkeypatch, one_device):
  """A copy of the reference as it was after step 24."""
  monkeypatch.setenv("TINY_DATA", str(place.data))
  monkeypatch.setenv("COMPMOD_CACHE", str(tmp_path / "cache"))
  return place.stopped_at(STEP, tmp_path / "run")


@pytest.fixture
def experiment(place):
  """The reference's experiment."""
  return load_config(str(place.config))


def _config(workdir):
  return json.loads((workdir / "config.json").read_text())


def _edit_meta(folder: Path, edit) -> None:
  """Changes meta.json of a checkpoint, whose manifest then fits again."""
  record = json.loads((folder / "meta.json").read_text())
  edit(record["meta"])
  text = json.dumps(record)
  (folder / "meta.json").write_text(text)
  manifest = json.loads((folder / "manifest.json").read_text())
  manifest["sha256"]["meta.json"] = hashlib.sha256(text.encode()).hexdigest()
  (folder / "manifest.json").write_text(json.dumps(manifest))


def _with(experiment, **changes):
  """An experiment with other fields of its optimizer, or of its own."""
  own = {field.name for field in dataclasses.fields(experiment)}
  rest = {name: value for name, value in changes.items() if name not in own}
  mine = {"optimizer": dataclasses.replace(experiment.optimizer, **rest)}
  mine |= {name: value for name, value in changes.items() if name in own}
  return dataclasses.replace(experiment, **mine)


def _phases(experiment, *phases):
  return dataclasses.replace(experiment, phases=phases)


# config.json.


def _flip(data: bytes) -> bytes:
  return data.replace(b'"learning_rate": 0.01', b'"learning_rate": 0.09')


DAMAGE = {
  "flipped": _flip,
  "cut": lambda data: data[:100],
  "empty": lambda data: b"",
  "NULs": lambda data: bytes(len(data)),
  "no UTF-8": lambda data: data.replace(b"tiny", b"\xff\xfe\xff\xfe"),
  "no object": lambda data: b"[]",
  "missing": None,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_or_missing_configuration_is_restored_from_the_checkpoint(
  run, experiment, damage
):
  path, change = run / "config.json", DAMAGE[damage]
  whole = path.read_bytes()
  path.unlink() if change is None else path.write_bytes(change(whole))
  (note,) = set_up(experiment, run, command="x").notes
  assert f"restored from the checkpoint of step {STEP}" in note
  assert path.read_bytes() == whole
  if change is not None:
    assert (run / "config.json.damaged").read_bytes() == change(whole)
    assert "the damaged file is config.json.damaged now" in note
  # Nothing slips in by way of a damaged file.
  path.unlink()
  with pytest.raises(UserError, match="seed: 0 there, 3 here"):
    set_up(dataclasses.replace(experiment, seed=3), run, command="x")


def test_a_damaged_configuration_that_nothing_can_restore_is_told(run, experiment):
  (run / "config.json").write_text('{"experiment": {')
  shutil.rmtree(run / "checkpoints")
  with pytest.raises(UserError, match=r"config\.json is damaged: .* copy it from a backup"):
    set_up(experiment, run, command="x")
  assert (run / "config.json").read_text() == '{"experiment": {'


def test_a_workdir_of_an_earlier_version_opens_and_gets_what_it_lacks(run, experiment):
  new = _config(run)
  assert {"sha256", "data", "phase_ends", "history"} <= new.keys()
  old = {name: new[name] for name in ("experiment", "command", "batch_multiple", "provenance")}
  (run / "config.json").write_text(json.dumps(old))
  for folder in checkpoint_folders(run):
    _edit_meta(folder, lambda meta: meta.pop("config"))
  (note,) = set_up(experiment, run, command="x").notes
  assert "has no fingerprint of its training data" in note
  assert _config(run) == new
  assert set_up(experiment, run, command="x").notes == []


def test_an_old_checkpoint_restores_the_experiment_that_it_holds(run, experiment):
  for folder in checkpoint_folders(run):
    _edit_meta(folder, lambda meta: meta.pop("config"))
  (run / "config.json").unlink()
  first, second = set_up(experiment, run, command="x").notes
  assert "restored from the checkpoint" in first
  assert "has no fingerprint" in second
  assert saved_experiment(run) == experiment


def test_a_configuration_of_which_no_step_was_saved_binds_nothing(run, experiment):
  """Such as one whose first step does not fit the memory."""
  for name in ("checkpoints", "models"):
    shutil.rmtree(run / name)
  other = dataclasses.replace(
    experiment, seed=3, task=dataclasses.replace(
      experiment.task, tokenizer=dataclasses.replace(experiment.task.tokenizer, vocab_size=12)
    )
  )  # fmt: skip
  (note,) = set_up(other, run, command="y").notes
  assert "another configuration, of which no step was saved" in note
  assert saved_experiment(run) == other
  assert (
    load_model_folder(run / "tokenizers")[1] == set_up(other, run, command="y").task.dataset.files()
  )
  assert _config(run)["command"] == "y"
  assert set_up(other, run, command="z").notes == []


@pytest.mark.parametrize("damage", [shutil.rmtree, lambda p: (p / "model.json").write_text("{")])
def test_tokenizers_are_restored_from_the_checkpoint(run, experiment, damage):
  files = load_model_folder(run / "tokenizers")[1]
  damage(run / "tokenizers")
  (note,) = set_up(experiment, run, command="x").notes
  assert f"the tokenizers are taken from the checkpoint of step {STEP}" in note
  assert load_model_folder(run / "tokenizers")[1] == files
  assert set_up(experiment, run, command="x").notes == []


# Data.


def _lines(path, change):
  lines = path.read_text().splitlines()
  path.write_text("".join(f"{line}\n" for line in change(lines)))


@pytest.fixture
def data(place, tmp_path, monkeypatch):
  """A copy of the reference's data, which a test may change."""
  folder = tmp_path / "data"
  shutil.copytree(place.data, folder)
  return folder


CONTENT = {
  "reversed": lambda lines: lines[::-1],
  "cut": lambda lines: lines[:150],
  "other words": lambda lines: ["ba " + lines[0], *lines[1:]],
}


@pytest.mark.parametrize("change", CONTENT)
def test_other_training_data_are_refused_with_what_changed_and_how_to_go_on(
  run, experiment, data, monkeypatch, change
):
  monkeypatch.setenv("TINY_DATA", str(data))
  for side in ("de", "en"):
    _lines(data / f"train.{side}", CONTENT[change])
  before = _config(run)
  with pytest.raises(UserError) as refused:
    set_up(experiment, run, command="x")
  message = str(refused.value)
  count = 150 if change == "cut" else 300
  assert f"{run} was trained on other data: task.data, source: 300 examples (sha256 " in message
  assert f" there, {count} examples (sha256 " in message
  assert _config(run) == before
  name = message.rstrip(".").split("--config.accept_data=")[1]
  again = dataclasses.replace(experiment, accept_data=name)
  notes = set_up(again, run, command="y").notes
  assert any(note.startswith(f"after step {STEP} with another configuration: task.data, source")
             for note in notes)  # fmt: skip
  after = _config(run)
  (entry,) = after["history"]
  assert (entry["step"], entry["experiment"]) == (STEP, before["experiment"])
  assert any("task.data, source: 300 examples" in line for line in entry["changed"])
  assert after["data"] != before["data"]
  # The same command goes on; other data are refused again, the old ones too.
  assert set_up(again, run, command="y").notes == []
  monkeypatch.undo()
  shutil.copytree(data, data.with_name("third"))
  _lines(data / "train.de", lambda lines: [*lines[:-1], "ba"])
  moved = dataclasses.replace(
    again, task=dataclasses.replace(again.task, data=dataclasses.replace(
      again.task.data, folder=str(data)
    ))
  )  # fmt: skip
  with pytest.raises(UserError, match=r"was trained on other data: task\.data, source"):
    set_up(moved, run, command="y")


def test_the_same_data_may_lie_elsewhere(run, experiment, data, monkeypatch):
  task = dataclasses.replace(
    experiment.task, data=dataclasses.replace(experiment.task.data, folder=str(data))
  )
  moved = dataclasses.replace(experiment, task=task)
  notes = set_up(moved, run, command="x").notes
  assert len(notes) == 1
  assert "task.data.folder: '$TINY_DATA' there" in notes[0]
  for folder in checkpoint_folders(run):
    _edit_meta(folder, lambda meta: meta.pop("config"))
  (run / "config.json").unlink()
  # Without a fingerprint nothing shows that they are the same.
  with pytest.raises(UserError, match=r"task\.data\.folder"):
    set_up(moved, run, command="x")


# What may change.


@pytest.mark.parametrize(
  "change",
  [
    {"learning_rate": 1e-3},
    {"clip": 0.1},
    {"clip": 0.0},
    {"schedule": "constant"},
    {"warmup_steps": 30},
    {"weight_decay": 0.0},
    {"micro_batches": 2},
    {"products": "bfloat16"},
    {"max_nonfinite": 50},
    {"patience": 3},
    {"evaluate_every": 5},
    {"evaluate_sentences": 10},
    {"score_train": True},
  ],
)
def test_what_is_to_come_may_change_and_is_told_and_kept(run, experiment, change):
  old = _config(run)
  changed = _with(experiment, **change)
  notes = set_up(changed, run, command="python -m new").notes
  (name, value), new = *change.items(), _config(run)
  assert f"after step {STEP} with another configuration: " in notes[0]
  assert f"{name}: " in notes[0]
  assert f" there, {value!r} here" in notes[0]
  (entry,) = new["history"]
  assert entry["experiment"] == old["experiment"]
  assert (entry["step"], entry["command"]) == (STEP, old["command"])
  assert entry["date"].endswith("+00:00")
  assert [line for line in entry["changed"] if f"{name}: " in line]
  assert (new["experiment"], new["command"]) == (to_json(changed), "python -m new")
  assert new["provenance"] == old["provenance"]
  assert set_up(changed, run, command="python -m new").notes == []


def test_the_notes_tell_what_a_change_means_for_the_schedule(run, experiment):
  changed = _phases(_with(experiment, learning_rate=1e-3), Phase(steps=120))
  *lines, note = set_up(changed, run, command="x").notes
  assert [line.split(": ", 1)[1] for line in lines] == [
    "optimizer.learning_rate: 0.01 there, 0.001 here",
    "phases.0.steps: 60 there, 120 here",
  ]
  before = float(learning_rate(experiment.optimizer, 60)(STEP))
  after = float(learning_rate(changed.optimizer, 120)(STEP))
  assert note == (
    f"the learning rate of the next step is {after:.3g} ({before:.3g} before the change); the"
    " schedule (cosine) and what is annealed over the run span 120 steps now (60 before)"
  )


def _task(experiment, **changes):
  return dataclasses.replace(experiment, task=dataclasses.replace(experiment.task, **changes))


@pytest.mark.parametrize(
  ("change", "words"),
  [
    (lambda e: dataclasses.replace(e, model=dataclasses.replace(e.model, ffn_dim=64)), "ffn_dim"),
    (lambda e: dataclasses.replace(e, model=dataclasses.replace(e.model, dropout=0.2)), "dropout"),
    (lambda e: dataclasses.replace(e, seed=1), "seed: 0 there, 1 here"),
    (lambda e: dataclasses.replace(e, ema=0.5), "ema"),
    (lambda e: _task(e, label_smoothing=0.2), "label_smoothing"),
    (lambda e: _task(e, batch=dataclasses.replace(e.task.batch, tokens=200)), "batch.tokens"),
    (lambda e: _task(e, tokenizer=dataclasses.replace(e.task.tokenizer, vocab_size=50)), "vocab"),
    (lambda e: _with(e, b1=0.8), "optimizer.b1"),
    (lambda e: _with(e, optimizer=dataclasses.replace(e.optimizer, name="muon")), "optimizer.name"),
  ],
)
def test_model_task_tokenizer_and_seed_stay(run, experiment, change, words):
  before = _config(run)
  with pytest.raises(UserError, match="belongs to another configuration") as refused:
    set_up(change(experiment), run, command="x")
  assert words in str(refused.value)
  assert _config(run) == before


def test_streams_of_evaluation_may_change():
  experiment = load_config("lm_recoding")
  old = _task(experiment, eval_rows=16)
  found = identity.compare(_held(experiment.phases, 10, old), experiment)
  assert found == [
    "task.eval_rows: 16 there, 0 here (scores differ by what streams do not see before them)"
  ]
  with pytest.raises(UserError, match=r"task\.rows: 16 there"):
    identity.compare(_held(experiment.phases, 10, _task(experiment, rows=16)), experiment)


def test_a_change_takes_effect_earlier_where_checkpoints_were_removed_since(run, experiment):
  changed = _with(experiment, learning_rate=1e-3)
  set_up(changed, run, command="x")
  shutil.rmtree(checkpoint_folders(run)[-1])
  set_up(changed, run, command="x")
  assert [entry["step"] for entry in _config(run)["history"]] == [steps_saved(run)[-1]]


# Phases.


def _held(phases, step, experiment, **config):
  experiment = dataclasses.replace(experiment, phases=phases)
  return identity.Held(Path("run"), {"experiment": to_json(experiment), **config}, step, {}, [])


OLD = (Phase("rest", trainable="rest", steps=30), Phase("heads", trainable="routing", epochs=3))


@pytest.mark.parametrize(
  ("step", "new", "ends"),
  [
    (10, (dataclasses.replace(OLD[0], steps=40), OLD[1]), [40, 70]),
    (10, (dataclasses.replace(OLD[0], steps=12), OLD[1]), [12, 42]),
    (10, (OLD[0], Phase("all", steps=5)), [30, 35]),
    (10, OLD[:1], [30]),
    (30, (dataclasses.replace(OLD[0], steps=40), OLD[1]), [40, 70]),
    (35, (OLD[0], dataclasses.replace(OLD[1], epochs=6)), [30, 90]),
    (60, (*OLD, Phase("all", steps=7)), [30, 60, 67]),
    (0, (Phase("other", steps=3), OLD[1]), [3, 33]),
  ],
)
def test_phases_to_come_may_change(experiment, step, new, ends):
  batches = [10] * len(new)
  found, past = identity.compare_phases(_held(OLD, step, experiment), new, batches)
  assert found
  assert identity.ends_of(new, batches, past) == ends


@pytest.mark.parametrize(
  ("step", "new", "words"),
  [
    (
      10,
      (dataclasses.replace(OLD[0], part="large"), OLD[1]),
      "phases.0.part: 'all' there, 'large'",
    ),
    (
      10,
      (dataclasses.replace(OLD[0], steps=9), OLD[1]),
      "would end at step 9, but 10 steps are do",
    ),
    (35, (dataclasses.replace(OLD[0], steps=31), OLD[1]), "phases.0.steps: 30 there, 31 here"),
    (35, OLD[:1], "phases.1: heads there, none here"),
    (10, (dataclasses.replace(OLD[0], trainable="all"), OLD[1]), "phases.0.trainable"),
  ],
)
def test_phases_that_began_stay(experiment, step, new, words):
  with pytest.raises(UserError) as refused:
    identity.compare_phases(_held(OLD, step, experiment), new, [10] * len(new))
  assert words in str(refused.value)


def test_phases_that_are_over_keep_their_ends_whatever_the_data(experiment):
  """Phases given in epochs are of other lengths with other data."""
  old = (Phase("one", epochs=2), Phase("two", epochs=2))
  held = _held(old, 25, experiment, phase_ends=[20, 40])
  found, past = identity.compare_phases(held, old, [15, 15])
  assert (found, past) == ([], [20])
  assert identity.ends_of(old, [15, 15], past) == [20, 50]
  with pytest.raises(UserError, match=r"phases\.1 would end at step 24, but 25 steps are done"):
    identity.compare_phases(held, old, [2, 2])


# Going on.


def _loop(experiment, workdir):
  made = set_up(experiment, workdir, command="x")
  with Writer(workdir, total_steps=made.total_steps, quiet=True) as writer, Preemption() as held:
    return Loop(made, writer, held)


@pytest.mark.parametrize(
  "change",
  [
    {"clip": 0.0},
    {"clip": 0.0, "weight_decay": 0.0},
    {"schedule": "plateau", "weight_decay": 0.0},
  ],
)
def test_moments_are_carried_over_to_an_optimizer_of_other_parts(run, experiment, change):
  saved = state_of(run)
  state = _loop(_with(experiment, **change), run).state
  moments = [part for part in state.opt_state if hasattr(part, "mu")]
  for kind in ("mu", "nu"):
    theirs = [leaf for path, leaf in saved.items() if f"/{kind}/" in path]
    mine = getattr(moments[0], kind)
    total = sum(float(jnp.sum(leaf)) for leaf in _leaves(mine))
    assert total == pytest.approx(sum(float(np.sum(leaf)) for leaf in theirs), rel=1e-5)
  assert int(moments[0].count) == STEP


def _leaves(tree):
  return [leaf for value in tree.values() for leaf in (
    _leaves(value) if isinstance(value, dict) else [value]
  )]  # fmt: skip


@pytest.mark.parametrize(
  ("stopped", "change", "now"),
  [
    (f"{NO_BETTER} bleu in 2 evaluations", {"patience": 2}, f"{NO_BETTER} bleu in 2 evaluations"),
    (f"{NO_BETTER} bleu in 2 evaluations", {"patience": 3}, ""),
    (f"{NO_BETTER} bleu in 2 evaluations", {"patience": 0}, ""),
    (TIME_UP, {"time_limit_minutes": 1e-9}, TIME_UP),
    (TIME_UP, {"time_limit_minutes": 100.0}, ""),
  ],
)
def test_a_run_that_stopped_early_goes_on_with_a_later_limit(run, experiment, stopped, change, now):
  def edit(meta):
    meta["history"] |= {"stopped": stopped, "stale": 2}

  _edit_meta(checkpoint_folders(run)[-1], edit)
  save_model_folder(run / "models" / "best", params={}, files={}, meta={"step": 20})
  assert _loop(dataclasses.replace(experiment, **change), run).history.stopped == now


@pytest.mark.parametrize(
  ("changes", "config", "accepted"),
  [
    ({}, {}, False),
    ({}, {"phases": (Phase(steps=STEP + 1),)}, True),
    ({"evaluated": 20}, {}, True),
    ({"stopped": TIME_UP, "seconds": 90.0}, {"phases": (Phase(steps=60),)}, True),
    (
      {"stopped": TIME_UP, "seconds": 90.0},
      {"phases": (Phase(steps=60),), "time_limit_minutes": 1.0},
      False,
    ),
  ],
)
def test_which_parameters_are_kept_may_change_while_some_are_to_be_evaluated(
  experiment, changes, config, accepted
):
  held = _held(experiment.phases, STEP, experiment)
  history = dataclasses.asdict(History(step=STEP, evaluated=STEP)) | changes
  held.meta = {"experiment": to_json(experiment), "history": history}
  now = {"phases": (Phase(steps=STEP),), "model_selection": "last", **config}
  changed = dataclasses.replace(experiment, **now)
  if accepted:
    identity.check_selection(held, changed, changed.phases[0].steps)
    return
  identity.check_selection(held, dataclasses.replace(changed, model_selection="best"), STEP)
  with pytest.raises(UserError, match=r"'best' there, 'last' here, .* Set model_selection = best"):
    identity.check_selection(held, changed, changed.phases[0].steps)


def test_the_parameters_that_a_finished_run_kept_stay(run, place, experiment, tmp_path):
  workdir = place.stopped_at(STEPS, tmp_path / "finished")
  before = _config(workdir)
  last = dataclasses.replace(experiment, model_selection="last")
  with pytest.raises(UserError, match="model_selection: 'best' there"):
    set_up(last, workdir, command="x")
  assert _config(workdir) == before
  (note,) = set_up(last, run, command="x").notes
  assert "model_selection: 'best' there, 'last' here" in note


@pytest.fixture
def branch(tmp_path):
  """Models as a run leaves them whose checkpoints after step 40 were removed."""
  for name, step in (("best", 60), ("step-00000040", 40), ("step-00000060", 60)):
    meta = {"step": step, "score": step / 10}
    params = {"w": np.full(2, step, np.float32)}
    save_model_folder(tmp_path / "models" / name, params=params, files={}, meta=meta)
  return tmp_path


def test_the_best_model_of_steps_that_are_not_made_again_is_left(branch):
  config = {"history": [{"step": 40, "changed": ["optimizer.clip: 0 there, 1 here"]}]}
  history = History(step=40, best=4.0, best_step=40)
  assert not identity.leave_branch(branch, config, history, pytest.fail)
  params, _, meta = load_model_folder(branch / "models" / "best")
  assert (meta["step"], params["w"].tolist()) == (40, [40, 40])
  assert not (branch / "models" / "step-00000060").exists()
  # It is not there any more: the next evaluation is the best.
  said = []
  save_model_folder(branch / "models" / "best", params=params, files={}, meta={"step": 60})
  assert identity.leave_branch(
    branch, config, History(step=40, best=3.0, best_step=20), said.append
  )
  assert "of step 20, is not there any more" in said[0]


def test_a_change_is_from_the_checkpoint_on_that_is_whole(branch):
  """The newest one, after which the change was entered, is damaged."""
  changed = [["optimizer.clip: 0 there, 1 here"], ["log_every: 5 there, 10 here"]]
  steps = (20, ["model.remat"]), (60, changed[0]), (60, changed[1])
  config = {"experiment": {}, "history": [{"step": n, "changed": lines} for n, lines in steps]}
  said = []
  history = History(step=40, best=4.0, best_step=40)
  assert not identity.leave_branch(branch, config, history, said.append)
  assert said == [
    "note: the checkpoint of step 60 cannot be used: the configuration changes after step 40"
  ]
  assert load_model_folder(branch / "models" / "best")[2]["step"] == 40
  assert not (branch / "models" / "step-00000060").exists()
  for kept in (config, read_config(branch)):
    assert [entry["step"] for entry in kept["history"]] == [20, 40, 40]


def test_models_stay_where_the_same_steps_are_made_again(branch):
  changed = ["log_every: 5 there, 10 here"]
  for entries in ([], [{"step": 20, "changed": ["seed"]}], [{"step": 40, "changed": changed}]):
    history = History(step=40, best=4.0, best_step=40)
    assert not identity.leave_branch(branch, {"history": entries}, history, pytest.fail)
  assert len(list((branch / "models").iterdir())) == 3


@pytest.mark.programs
def test_a_finished_run_trains_further_with_more_steps_and_a_lower_rate(place, tmp_path):
  workdir = place.stopped_at(STEPS, tmp_path / "run")
  options = ("--config.phases.0.steps=70", "--config.optimizer.learning_rate=0.001")
  options += ("--config.optimizer.clip=0", "--config.evaluate_sentences=20")
  with Program(place, workdir, *options) as program:
    shown = program.trained()
  assert "span 70 steps now (60 before)" in shown
  assert steps_saved(workdir)[-2:] == [64, 70]
  record = record_of(workdir)
  assert record["meta"]["config"] == read_config(workdir)
  lines = metrics_of(workdir, "train")
  assert lines[:12] == metrics_of(place.reference, "train")
  assert [line["step"] for line in lines[12:]] == [65, 70]
  assert lines[12]["learning_rate"] == pytest.approx(
    float(learning_rate(load_config(str(place.config)).optimizer, 70)(64)) / 10, rel=1e-4
  )


@pytest.mark.slow
@pytest.mark.parametrize("remedy", ["optimizer.learning_rate=0.01", "optimizer.clip=1"])
def test_what_the_message_of_numbers_that_explode_advises_works(place, tmp_path, remedy):
  workdir = place.stopped_at(STEP, tmp_path / "run")
  bad = ("--config.optimizer.learning_rate=1e9", "--config.max_nonfinite=2")
  bad += ("--config.optimizer.clip=0",)
  with Program(place, workdir, *bad) as program:
    shown = program.finish(2)
  for words in ("optimizer.learning_rate=1e+08", "optimizer.clip=1", f"{workdir}/checkpoints"):
    assert words in shown
  for folder in checkpoint_folders(workdir):
    if int(folder.name[5:13]) > STEP:
      shutil.rmtree(folder)
  kept = () if "clip" in remedy else bad[1:]
  with Program(place, workdir, *kept, f"--config.{remedy}") as program:
    program.trained()
  assert steps_saved(workdir)[-1] == STEPS
  assert all(line["skipped"] == 0 for line in metrics_of(workdir, "train"))


def test_a_configuration_that_was_written_is_read_again(tmp_path):
  config = {"experiment": {"a": (1, 2.5)}, "data": {}, "history": []}
  write_config(tmp_path, config)
  assert read_config(tmp_path) == {**config, "experiment": {"a": [1, 2.5]}}
  assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
