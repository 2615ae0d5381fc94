"""COGS: what its files hold, and sentences that are held out of training where there is no gen."""

import gzip
import re
from collections import Counter

import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.data.base import DataError
from compmod_jax.data.sources.cogs import (
  CogsData,
  Form,
  Role,
  held_out_for,
  kept_roles,
  read_form,
)

THE_CAT = "* cat ( x _ 1 ) ; see . agent ( x _ 2 , x _ 1 ) AND see . theme ( x _ 2 , Emma )"
DEEP = (
  "* chair ( x _ 9 ) ; paint . agent ( x _ 1 , Liam ) AND paint . theme ( x _ 1 , x _ 3 ) AND"
  " box ( x _ 3 ) AND box . nmod . on ( x _ 3 , x _ 6 ) AND table ( x _ 6 ) AND"
  " table . nmod . beside ( x _ 6 , x _ 9 )"
)
SAYS = (
  "say . agent ( x _ 1 , Emma ) AND say . ccomp ( x _ 1 , x _ 4 ) AND hope . agent ( x _ 4 , Liam )"
  " AND hope . ccomp ( x _ 4 , x _ 7 ) AND smile . agent ( x _ 7 , Mia )"
)


def test_a_form_has_the_roles_of_its_nouns_and_its_depths():
  assert read_form(THE_CAT) == Form(
    (Role("cat", "agent", False), Role("Emma", "theme", True)), prepositions=0, clauses=0
  )
  deep = read_form(DEEP)
  assert deep[1:] == (2, 0)
  assert deep.roles == (
    Role("Liam", "agent", True),
    Role("box", "theme", False),
    Role("table", "nmod", False),
    Role("chair", "nmod", False),
  )
  assert read_form(SAYS) == Form(
    tuple(Role(name, "agent", True) for name in ("Emma", "Liam", "Mia")), 0, 2
  )
  # Two phrases behind one noun each are not inside each other.
  side = THE_CAT + " AND cat . nmod . on ( x _ 1 , x _ 5 ) AND mat ( x _ 5 )"
  assert read_form(side).prepositions == 1
  for text in ("walk", "LAMBDA a . ball ( a )", "cat ( x _ 1", ""):
    with pytest.raises(DataError, match="is not a logical form"):
      read_form(text)


def forms_of(*roles: tuple[str, str], times: int = 10) -> list[Form]:
  return [Form((Role(noun, role, noun.istitle()),), 0, 0) for noun, role in roles] * times


def test_every_other_noun_is_kept_in_one_role():
  nouns = ("ape", "bat", "cow", "Ann", "Bob")
  forms = forms_of(*[(noun, role) for noun in nouns for role in ("agent", "theme")])
  forms += forms_of(("dog", "agent"), ("Cat", "theme"), times=50)  # have one role each
  forms += forms_of(("eel", "agent"), ("eel", "theme"), times=300)  # is too common
  forms += forms_of(("fox", "agent"), ("fox", "theme"), times=9)  # is too rare
  forms += [Form((), 0, 0)] * 2_000
  kept = kept_roles(forms)
  assert kept == {"ape": "agent", "bat": "theme", "cow": "agent", "Ann": "agent", "Bob": "theme"}
  assert kept_roles(forms[::-1]) == kept


@pytest.mark.parametrize(
  ("form", "why"),
  [
    (Form((Role("cat", "agent", False), Role("Emma", "theme", True)), 1, 1), set()),
    (Form((Role("cat", "theme", False),), 0, 0), {"agent_to_theme_common"}),
    (Form((Role("Emma", "recipient", True),), 0, 0), {"theme_to_recipient_proper"}),
    (Form((), 2, 2), {"pp_recursion", "cp_recursion"}),
  ],
)
def test_a_sentence_is_held_out_for_its_roles_and_its_depth(form, why):
  assert held_out_for(form, {"cat": "agent", "Emma": "theme"}) == why


@pytest.fixture
def folder(tmp_path):
  """Files in the published form: names that are often both agent and theme, and deep sentences."""
  lines = [
    f"{agent} saw {theme} .\tsee . agent ( x _ 1 , {agent} ) AND see . theme ( x _ 1 ,"
    f" {theme} )\tin_distribution"
    for agent, theme in [("Ann", "Bob"), ("Bob", "Ann")] * 10
  ]
  lines += ["The cat smiled .\t* cat ( x _ 1 ) ; smile . agent ( x _ 2 , x _ 1 )\tin_distribution"]
  lines += [lines[-1].replace("cat", f"cat{i}") for i in range(2_000)]
  lines += [f"The cat saw .\t{DEEP}\tin_distribution", "Ann\tAnn\tprimitive"]
  lines += ["Ann smiled .\tsmile . agent ( x _ 1 , Ann )\texposure_example_subj_proper"]
  lines += ["Bob smiled .\tsmile . agent ( x _ 1 , Bob )\tin_distribution"]
  with gzip.open(tmp_path / "train.tsv.gz", "wt") as file:
    file.write("\n".join(lines) + "\n")
  (tmp_path / "dev.tsv").write_text("\n".join(lines[-5:]) + "\n")
  (tmp_path / "test.tsv").write_text(lines[20] + "\n")
  return tmp_path


def test_published_parts_are_the_files_with_their_categories(folder):
  data = CogsData(folder=str(folder))
  assert data.splits() == ("train", "valid", "test", "gen")
  train = data.load("train")
  assert len(train) == 2_025
  assert train.source[0] == "Ann saw Bob ."
  assert train.target[-1] == "smile . agent ( x _ 1 , Bob )"
  assert train.where(2_022) == "train.tsv.gz:2023"
  assert Counter(one["category"] for one in train.info or ()) == {
    "in_distribution": 2_023,
    "primitive": 1,
    "exposure_example_subj_proper": 1,
  }
  assert (train.metric, data.metric) == ("exact_match", "exact_match")
  with pytest.raises(UserError, match=r"neither gen\.tsv .* Set gen to 'held_out', or folder"):
    data.load("gen")
  (folder / "gen.tsv").write_text("Ann saw .\tsee . agent ( x _ 1 , Ann )\tactive_to_passive\n")
  assert data.load("gen").info == [{"category": "active_to_passive"}]
  (folder / "train_100.tsv").write_text("Ann\tAnn\tprimitive\n")
  assert len(CogsData(folder=str(folder), exposures=100).load("train")) == 1
  assert CogsData(exposures=100).published_counts["train"] == 39_500


def test_held_out_sentences_are_taken_out_of_training_and_of_both_other_parts(folder):
  data = CogsData(folder=str(folder), gen="held_out")
  assert data.splits() == ("train", "valid", "test", "held_out")
  assert data.published_counts == {}
  train, held_out = data.load("train"), data.load("held_out")
  # Ann is kept as an agent and Bob as a theme; where both are wrong, they are two categories.
  assert Counter(held_out.source) == {"The cat saw .": 1, "Bob smiled .": 1}
  assert held_out.info == [{"category": "pp_recursion"}, {"category": "theme_to_agent_proper"}]
  assert held_out.where(1) == "train.tsv.gz:2025"
  assert Counter(train.source)["Ann saw Bob ."] == 10
  assert "Bob saw Ann ." not in train.source
  assert "Ann" in train.source
  assert len(train) == 2_025 - 10 - 2
  assert data.load("valid").source == ["The cat1999 smiled .", "Ann smiled ."]
  assert len(data.load("test")) == 1
  (folder / "test.tsv").write_text(
    "An owl smiled .\towl ( x _ 1 ) AND smile . agent ( x _ 2 , x _ 1 )\tin_distribution\n"
  )
  assert len(data.load("test")) == 0  # no owl is trained


def test_damaged_files_are_told_with_their_line(folder):
  (folder / "dev.tsv").write_text("a .\tsmile . agent ( x _ 1 , Ann )\tx\na .\tb\n")
  with pytest.raises(DataError, match=r"dev\.tsv:2 has 2 columns between tabs"):
    CogsData(folder=str(folder)).load("valid")
  (folder / "dev.tsv").write_text("a .\tsmile . agent\tin_distribution\n")
  assert len(CogsData(folder=str(folder)).load("valid")) == 1
  with pytest.raises(DataError, match=r"dev\.tsv:1: 'smile \. agent' is not a logical form"):
    CogsData(folder=str(folder), gen="held_out").load("valid")


@pytest.mark.parametrize(
  ("make", "match"),
  [
    (lambda: CogsData().load("train"), r"folder is empty; .* set task\.data\.folder"),
    (lambda: CogsData(exposures=2), "exposures is 2"),  # type: ignore[arg-type]
    (lambda: CogsData(gen="made"), "'made'"),  # type: ignore[arg-type]
    (lambda: CogsData().load("held_out"), "'held_out'"),
  ],
)
def test_mistakes_are_told(make, match):
  with pytest.raises(UserError, match=match):
    make()


@pytest.mark.real_data
def test_the_published_files_have_their_sizes_and_what_is_held_out_is_nowhere_trained():
  data = CogsData(folder="$COMPMOD_DATA/cogs")
  for part in ("train", "valid", "test"):
    assert len(data.load(part)) == data.published_counts[part]
  made = CogsData(folder="$COMPMOD_DATA/cogs", gen="held_out")
  train, held_out = made.load("train"), made.load("held_out")
  counts = Counter(one["category"] for one in held_out.info or ())
  for kind in ("common", "proper"):
    for roles in ("agent_to_theme", "agent_to_recipient", "theme_to_agent", "theme_to_recipient"):
      assert counts[f"{roles}_{kind}"] > 90
  assert min(counts["pp_recursion"], counts["cp_recursion"]) > 100
  assert not set(train.source) & set(held_out.source)
  # Sought in the text of the forms alone: Sophia is kept as an agent, Oliver as a theme.
  for name, kept in (("Sophia", "agent"), ("Oliver", "theme")):
    for pairs, other in ((train, False), (held_out, True)):
      forms = " AND ".join(form for form in pairs.target if "LAMBDA" not in form)
      roles = set(re.findall(rf"\. (\w+) \( x _ \d+ , {name} \)", forms))
      assert (roles - {kept} != set()) == other
      assert other or roles == {kept}
  assert max(form.count(" nmod ") for form in train.target) <= 3  # one for each of three nouns
