"""The programs that look into trained models: options, files, mistakes."""

import json

import pytest
import tiny_model

from compmod_jax.commands import analyse, compare
from compmod_jax.core.errors import UserError
from compmod_jax.training import run


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
  made = tiny_model.make_workdir(tmp_path_factory.mktemp("analyse") / "run")
  lines = [
    {"kind": "train", "step": step, "router/encoder/layer_0/self/signature_norm_0": 1.0 + step}
    for step in (10, 20)
  ]
  (made / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
  return made


@pytest.fixture
def program(workdir, monkeypatch, capsys):
  monkeypatch.setattr(run, "use_compile_cache", lambda: None)

  def call(main, *options):
    main([*options, "--quiet"])
    return capsys.readouterr().out

  return call


def test_heads_are_told_from_a_checkpoint_and_a_split(program, workdir):
  printed = program(
    analyse.main,
    "heads",
    "--workdir",
    str(workdir),
    "--words",
    "Der",
    "--frequent",
    "2",
    "--no_untrained",
  )
  folder = workdir / "analysis" / "heads"
  assert f"report: {folder / 'report.html'}" in printed
  data = json.loads((folder / "result.json").read_text())
  assert data["split"] == "test"
  assert data["labels"]["source"]["word"][0] == "der"
  assert data["command"].startswith("python -m train.analyse heads --workdir")
  assert data["provenance"]["packages"]["jax"]
  assert all(f"- {sentence}" in printed for sentence in data["summary"])
  # What training recorded is part of the report.
  assert (folder / "plots" / "training_signature_norms.png").is_file()


def test_ablations_of_several_splits_have_folders_of_their_own(program, workdir, tmp_path):
  program(
    analyse.main, "ablate", "--workdir", str(workdir), "--splits", "test", "valid", "--units",
    "encoder/layer_0/self:1", "--decode", "0", "--samples", "100", "--output", str(tmp_path),
    "--model", "step-00000010",
  )  # fmt: skip
  for split in ("test", "valid"):
    data = json.loads((tmp_path / split / "result.json").read_text())
    assert (data["split"], len(data["effects"])) == (split, 1)


def test_two_models_of_a_run_are_compared(program, workdir, tmp_path):
  first, second = (str(workdir / "models" / name) for name in ("step-00000010", "best"))
  printed = program(
    compare.main, first, second, "--decode", "3", "--method", "greedy", "--samples", "100",
    "--output", str(tmp_path),
  )  # fmt: skip
  data = json.loads((tmp_path / "result.json").read_text())
  assert [data["A"], data["B"], data["decoded"]] == [first, second, 3]
  assert data["groups"][0]["values"]["loss"]["A"] != data["groups"][0]["values"]["loss"]["B"]
  assert "- BLEU on 3 examples: A" in printed


def test_mistakes_are_told_with_what_is_near(program, workdir):
  with pytest.raises(UserError, match=r"is 'haeds'.*Did you mean 'heads'"):
    program(analyse.main, "haeds", "--workdir", str(workdir))
  with pytest.raises(UserError, match=r"--split is 'tset'.*Did you mean 'test'"):
    program(analyse.main, "heads", "--workdir", str(workdir), "--split", "tset")
  with pytest.raises(UserError, match=r"--shufles is not an option. Did you mean --shuffles"):
    program(analyse.main, "heads", "--workdir", str(workdir), "--shufles", "3")
  with pytest.raises(UserError, match=r"analysis is missing \(ablate, attention, codes,"):
    program(analyse.main)
  with pytest.raises(UserError, match="1 workdirs are given; two are compared"):
    program(compare.main, str(workdir))


def test_files_of_ones_own_are_run_each_after_its_option(program, workdir, tmp_path):
  names = ("first.py", "second.py")
  for name in names:
    (tmp_path / name).write_text(f"raise ValueError({name!r})\n" if name == names[1] else "")
  codes = [word for name in names for word in ("--code", str(tmp_path / name))]
  with pytest.raises(UserError, match=r"second\.py:1 .* ValueError"):
    program(compare.main, str(workdir), str(workdir), *codes)
  with pytest.raises(UserError, match=r"--code is .*third\.py', which is not a file"):
    program(compare.main, str(workdir), str(workdir), "--code", str(tmp_path / "third.py"))


@pytest.mark.parametrize("name", sorted(analyse.ANALYSES))
def test_every_analysis_lists_its_options(name, capsys):
  with pytest.raises(SystemExit):
    analyse.main([name, "--help"])
  printed = " ".join(capsys.readouterr().out.split())
  for option in ("--workdir", "--sentences", "--output", "--seed"):
    assert option in printed
