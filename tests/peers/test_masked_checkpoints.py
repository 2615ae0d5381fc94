"""RoBERTa and BERT of `transformers`, imported and exported, give the same logits."""

import inspect
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import compmod_jax
from compmod_jax.checkpoints.huggingface import Checkpoint, read_checkpoint, write_checkpoint
from compmod_jax.checkpoints.huggingface_folder import DEFAULTS, REMOVED_DEFAULTS
from compmod_jax.checkpoints.huggingface_tokenizer import TOKENIZER_DEFAULTS, read_tokenizer
from compmod_jax.commands import convert
from compmod_jax.models.encoder import Encoder, EncoderConfig

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

pytestmark = pytest.mark.peers

VOCAB = 50
LENGTHS = [1, 2, 7, 16]
WORDS = ["the", "dog", "cat", "sleeps", "sees", "a", "bird", "."]


def make_roberta(**fields):
  config = transformers.RobertaConfig(
    vocab_size=VOCAB,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=20,
    max_position_embeddings=18,
    type_vocab_size=1,
    pad_token_id=1,
    bos_token_id=0,
    eos_token_id=2,
    layer_norm_eps=1e-5,
    **fields,
  )
  return transformers.RobertaForMaskedLM(config)


def make_bert(**fields):
  config = transformers.BertConfig(
    vocab_size=VOCAB,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=24,
    max_position_embeddings=16,
    type_vocab_size=2,
    pad_token_id=0,
    **fields,
  )
  return transformers.BertForMaskedLM(config)


@pytest.fixture(
  scope="module",
  params=["roberta", "bert", "bert, another activation", "roberta, another activation"],
)
def theirs(request, tmp_path_factory):
  """A model of theirs with random weights (biases and norms too), and its folder."""
  torch.manual_seed(0)
  make = make_roberta if "roberta" in request.param else make_bert
  other = {"hidden_act": "relu" if make is make_roberta else "gelu_new"}
  model = make(**(other if "another" in request.param else {}))
  with torch.no_grad():
    for value in model.parameters():
      value.add_(0.3 * torch.randn_like(value))
  folder = tmp_path_factory.mktemp("theirs") / "model"
  model.eval().save_pretrained(folder, safe_serialization=True)
  return model, folder


def batch(length: int, pad: int) -> np.ndarray:
  """Three sequences, two of them padded at the end."""
  random = np.random.default_rng(length)
  tokens = random.integers(5, VOCAB, (3, length))
  for row in (1, 2):
    tokens[row, max(1, length - 2 * row) :] = pad
  return tokens


def their_logits(model, tokens: np.ndarray, pad: int) -> np.ndarray:
  given = torch.tensor(tokens)
  with torch.no_grad():
    return model(given, attention_mask=(given != pad).long()).logits.numpy()


def our_logits(found: Checkpoint, tokens: np.ndarray) -> np.ndarray:
  encoder = Encoder(found.config, found.vocab, found.pad)
  return np.asarray(jax.jit(encoder.apply)({"params": found.params}, jnp.asarray(tokens)))


@pytest.mark.parametrize("length", LENGTHS)
def test_an_imported_model_gives_the_same_logits_at_every_real_position(theirs, length):
  model, folder = theirs
  found = read_checkpoint(folder)
  tokens = batch(length, found.pad)
  ours = our_logits(found, tokens)
  real = tokens != found.pad
  expected = their_logits(model, tokens, found.pad)
  assert np.abs(expected[real]).max() > 0.5
  np.testing.assert_allclose(ours[real], expected[real], atol=1e-4)


@pytest.mark.parametrize("length", LENGTHS)
def test_their_library_opens_an_exported_folder_and_gives_the_same_logits(theirs, length, tmp_path):
  _, folder = theirs
  found = read_checkpoint(folder)
  write_checkpoint(tmp_path / "out", found, bos=0, eos=2)
  again = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "out").eval()
  assert type(again).__name__.lower().startswith(found.kind)
  tokens = batch(length, found.pad)
  real = tokens != found.pad
  ours = our_logits(found, tokens)
  np.testing.assert_allclose(ours[real], their_logits(again, tokens, found.pad)[real], atol=1e-4)


@pytest.mark.parametrize("kind", ["roberta", "bert"])
def test_a_model_of_ours_can_be_exported_in_either_layout(kind, tmp_path):
  config = EncoderConfig(encoder_layers=1, dim=16, heads=2, ffn_dim=20, max_length=12)
  tokens = jnp.ones((1, 2), int)
  params = nn.unbox(jax.jit(Encoder(config, VOCAB, 0).init)(jax.random.key(0), tokens))["params"]
  made = Checkpoint(config, params, VOCAB, 0, kind)
  write_checkpoint(tmp_path / "out", made)
  theirs = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "out").eval()
  tokens = batch(9, 0)
  ours = our_logits(made, tokens)
  real = tokens != 0
  np.testing.assert_allclose(ours[real], their_logits(theirs, tokens, 0)[real], atol=1e-4)


def test_every_default_that_a_configuration_may_leave_out_is_theirs():
  for kind, defaults in DEFAULTS.items():
    config = transformers.AutoConfig.for_model(kind)
    assert {name: getattr(config, name) for name in defaults} == defaults, kind
  for kind, defaults in REMOVED_DEFAULTS.items():
    config = transformers.AutoConfig.for_model(kind)
    for name, value in defaults.items():
      assert getattr(config, name, value) == value, (kind, name)


def test_every_default_of_tokenizers_is_theirs():
  """Where `tokenizer_config.json` leaves a field out; theirs are arguments with defaults."""
  classes = {"roberta": transformers.RobertaTokenizerFast, "bert": transformers.BertTokenizerFast}
  for kind, defaults in TOKENIZER_DEFAULTS.items():
    theirs = inspect.signature(classes[kind].__init__).parameters
    assert {name: theirs[name].default for name in defaults} == defaults, kind


@pytest.mark.parametrize("kind", ["roberta", "bert"])
def test_a_configuration_that_says_nothing_but_its_sizes_is_read_as_theirs(kind, tmp_path):
  torch.manual_seed(0)
  model = make_roberta() if kind == "roberta" else make_bert()
  model.eval().save_pretrained(tmp_path, safe_serialization=True)
  path = tmp_path / "config.json"
  names = "hidden_size num_hidden_layers num_attention_heads intermediate_size"
  names += " max_position_embeddings type_vocab_size vocab_size model_type"
  given = json.loads(path.read_text())
  path.write_text(json.dumps({name: given[name] for name in names.split()}))
  theirs = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
  found = read_checkpoint(tmp_path)
  assert found.pad == theirs.config.pad_token_id
  tokens = batch(7, found.pad)
  real = tokens != found.pad
  ours = our_logits(found, tokens)
  np.testing.assert_allclose(ours[real], their_logits(theirs, tokens, found.pad)[real], atol=1e-4)


def test_the_default_sizes_are_roberta_base_s_to_the_last_parameter():
  config = transformers.RobertaConfig(
    vocab_size=50_265, max_position_embeddings=514, type_vocab_size=1, layer_norm_eps=1e-5
  )
  with torch.device("meta"):
    theirs = transformers.RobertaForMaskedLM(config)
  ours = Encoder(EncoderConfig(), 50_265, 1)
  shapes = jax.eval_shape(ours.init, jax.random.key(0), jnp.ones((1, 2), int))
  count = sum(leaf.size for leaf in jax.tree.leaves(shapes))
  # Theirs also have one segment's vector and two positions that are never used.
  assert count == sum(p.numel() for p in theirs.parameters()) - 3 * 768
  assert 124e6 < count < 125e6


# Tokenizers, and models that are used with them.


def write_byte_pairs(folder):
  """RoBERTa's vocabulary files, trained on a few words."""
  made = tokenizers.ByteLevelBPETokenizer()
  special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
  text = [" ".join(WORDS)] * 20
  made.train_from_iterator(text, vocab_size=300, min_frequency=1, special_tokens=special)
  made.save_model(str(folder))


def write_word_pieces(folder):
  """BERT's vocabulary file."""
  letters = sorted(set("".join(WORDS)))
  pieces = [*letters, *(f"##{letter}" for letter in letters), *WORDS, "##s", "bird"]
  words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *dict.fromkeys(pieces)]
  (folder / "vocab.txt").write_text("\n".join(words) + "\n")


@pytest.fixture(scope="module", params=["roberta", "bert"])
def whole(request, tmp_path_factory):
  """A folder of theirs with model and vocabulary; their tokenizer; ours of the imported model."""
  folder = tmp_path_factory.mktemp("whole") / request.param
  folder.mkdir()
  if request.param == "roberta":
    write_byte_pairs(folder)
    # As in the published checkpoints: the mask takes the space before it along.
    mask = transformers.AddedToken("<mask>", lstrip=True, special=True)
    theirs = transformers.RobertaTokenizerFast.from_pretrained(folder, mask_token=mask)
    model = make_roberta()
  else:
    write_word_pieces(folder)
    theirs = transformers.BertTokenizerFast.from_pretrained(folder)
    model = make_bert()
  model.resize_token_embeddings(len(theirs))
  model.eval().save_pretrained(folder, safe_serialization=True)
  place = folder.parent / "ours"
  convert.main(["--huggingface", str(folder), "--workdir", str(place)])
  return folder, theirs, model, compmod_jax.load(place)


TEXTS = ["the dog sleeps .", "the cat sees a birds .", "  dogs  ", "zebra the", "", "the {} sees"]


def test_texts_have_the_token_numbers_that_theirs_have(whole):
  folder, theirs, _, ours = whole
  for text in (text.format(theirs.mask_token) for text in TEXTS):
    assert ours.task.generator.encode(text) == theirs(text)["input_ids"], text
    assert (
      read_tokenizer(folder).encode(text) == theirs(text, add_special_tokens=False)["input_ids"]
    )
  assert ours.tokenizer.mask == theirs.mask_token_id
  assert ours.tokenizer.pad == theirs.pad_token_id
  assert ours.tokenizer.decode(theirs("the dog sees")["input_ids"]) == "the dog sees"


def test_filling_in_gives_the_probabilities_that_theirs_give(whole):
  _, theirs, model, ours = whole
  text = f"the {theirs.mask_token} sees a dog ."
  (filled,) = ours.fill(["the <mask> sees a dog ."], top=4)
  given = theirs(text, return_tensors="pt")
  place = given["input_ids"][0].tolist().index(theirs.mask_token_id)
  with torch.no_grad():
    chances = torch.softmax(model(**given).logits[0, place], -1).numpy()
  chances[list(ours.tokenizer.controls)] = -1
  best = np.argsort(-chances)[:4]
  np.testing.assert_allclose(
    [c.probability for c in filled.candidates[0]], chances[best], rtol=1e-3
  )
  assert [c.token for c in filled.candidates[0]] == [ours.tokenizer.text_of(i) for i in best]


def test_an_imported_model_is_exported_with_its_tokenizer(whole, tmp_path):
  _, theirs, model, ours = whole
  kind = ours.meta["kind"]
  out = tmp_path / "out"
  convert.main(
    ["--workdir", str(ours.folder), "--huggingface", str(out), "--export", "--kind", kind]
  )
  again = transformers.AutoModelForMaskedLM.from_pretrained(out).eval()
  tokenizer = transformers.AutoTokenizer.from_pretrained(out)
  assert json.loads((out / "config.json").read_text())["pad_token_id"] == theirs.pad_token_id
  for text in TEXTS[:3]:
    plain = {"add_special_tokens": False}
    assert tokenizer(text, **plain)["input_ids"] == theirs(text, **plain)["input_ids"]
    given = theirs(text, return_tensors="pt")
    with torch.no_grad():
      np.testing.assert_allclose(
        again(**given).logits.numpy(), model(**given).logits.numpy(), atol=1e-4
      )
