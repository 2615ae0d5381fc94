"""Generated texts are drawn once on a machine and kept on the disk."""

import pytest

from compmod_jax.data import generated
from compmod_jax.data.synthetic.grammar import GrammarData, splits

TEXTS = [("ein Haus", "a house"), ("Bücher\n", "books\u2028")]


@pytest.fixture
def place(tmp_path, monkeypatch):
  """A cache of the test's own, in which the quickest draw is worth keeping."""
  monkeypatch.setenv("COMPMOD_CACHE", str(tmp_path / "cache"))
  monkeypatch.setattr(generated, "_WORTH", 0.0)
  return tmp_path


def _draws(place, description="valid of A", code="first"):
  """What `kept` gives, and whether it had to draw."""
  program = place / "program.py"
  program.write_text(code)
  drawn = []

  def draw():
    drawn.append(1)
    return TEXTS

  return generated.kept(description, [program], draw), bool(drawn)


def test_texts_are_drawn_once(place):
  assert _draws(place) == (TEXTS, True)
  assert _draws(place) == (TEXTS, False)


@pytest.mark.parametrize("change", [{"description": "valid of B"}, {"code": "second"}])
def test_other_texts_are_drawn_anew(place, change):
  _draws(place)
  assert _draws(place, **change)[1]
  assert not _draws(place)[1]


def test_a_damaged_file_is_drawn_anew_and_replaced(place):
  _draws(place)
  (file,) = (place / "cache" / "generated").iterdir()
  file.write_bytes(file.read_bytes()[:-3] + b"???")
  assert _draws(place) == (TEXTS, True)
  assert _draws(place) == (TEXTS, False)


def test_a_folder_that_cannot_be_written_is_no_error(place):
  (place / "cache").write_text("a file")
  assert _draws(place) == (TEXTS, True)
  assert _draws(place) == (TEXTS, True)


@pytest.mark.parametrize("reason", ["quick", "no cache"])
def test_what_is_quick_or_not_wanted_is_not_kept(place, monkeypatch, reason):
  if reason == "quick":
    monkeypatch.setattr(generated, "_WORTH", 60.0)
  else:
    monkeypatch.setenv("COMPMOD_CACHE_GB", "0")
  assert _draws(place) == (TEXTS, True)
  assert _draws(place) == (TEXTS, True)
  assert not (place / "cache").exists()


def test_the_grammar_gives_kept_texts_with_the_same_annotations(place, monkeypatch):
  """Directions, seeds and splits are told apart; annotations are drawn when they are read."""
  sizes = {"valid": 30, "shifted": 30}
  configs = [GrammarData(seed=1, **sizes), GrammarData(seed=2, **sizes, direction="en-de")]
  first = [config.load(split) for config in configs for split in ("valid", "attractor")]
  calls = []
  draw = splits._Draw._draw
  monkeypatch.setattr(splits._Draw, "_draw", lambda self, i: (calls.append(i), draw(self, i))[1])
  again = [config.load(split) for config in configs for split in ("valid", "attractor")]
  assert calls == []
  for one, other, config in zip(first, again, [configs[0]] * 2 + [configs[1]] * 2, strict=True):
    assert (one.source, one.target) == (other.source, other.target)
    assert list(one.info) == list(other.info)
    assert one.relations(3) == other.relations(3)
    split = other.where(0).removeprefix("grammar:").removesuffix("[0]")
    assert config.pair(split, 7) == (other.source[7], other.target[7], other.info[7])
    assert other.info[-1] == other.info[len(other) - 1] == other.info[-2:][1]
  assert len({tuple(one.source) for one in first}) == len(first)
