"""GPT-2 of `transformers`, imported and exported, gives the same logits."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import compmod_jax
from benchmarks.roles import write_random_gpt2
from compmod_jax.checkpoints.gpt2 import as_vanilla_set, read_gpt2, vanilla_sizes, write_gpt2
from compmod_jax.commands import convert
from compmod_jax.data.text_tokenizer import FILE
from compmod_jax.data.tokenizers import gpt2 as files_of_gpt2
from compmod_jax.data.tokenizers.vocabulary import Words
from compmod_jax.decoding import for_generation, greedy
from compmod_jax.models.decoder_lm import DecoderLM
from compmod_jax.models.nemot import Nemot, NemotConfig
from compmod_jax.models.text import Text
from compmod_jax.tasks.causal_lm import CausalLMConfig

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

pytestmark = pytest.mark.peers

VOCAB, PAD = 60, 59
LENGTHS = [1, 7, 65, 90]


@pytest.fixture(scope="module", params=["gelu_new", "gelu"])
def theirs(request):
  torch.manual_seed(0)
  config = transformers.GPT2Config(
    vocab_size=VOCAB,
    n_positions=96,
    n_embd=24,
    n_layer=3,
    n_head=4,
    activation_function=request.param,
    initializer_range=0.3,
    bos_token_id=PAD,
    eos_token_id=PAD,
  )
  model = transformers.GPT2LMHeadModel(config).eval()
  with torch.no_grad():  # biases and norms are zeros and ones at first
    for parameter in model.parameters():
      parameter.add_(0.1 * torch.randn_like(parameter))
  return model


@pytest.fixture(scope="module")
def folder(theirs, tmp_path_factory):
  path = tmp_path_factory.mktemp("gpt2")
  theirs.save_pretrained(path, safe_serialization=True)
  return path


def batch(length):
  """Two texts, the second one shorter by a third."""
  tokens = np.random.default_rng(length).integers(0, PAD, (2, length))
  tokens[1, length - length // 3 :] = PAD
  return tokens


def logits_of(model, tokens):
  with torch.no_grad():
    mask = torch.tensor(tokens != PAD).long()
    return model(torch.tensor(tokens), attention_mask=mask).logits.numpy()


@pytest.mark.parametrize("length", LENGTHS)
def test_the_imported_model_gives_the_same_logits(theirs, folder, length):
  tokens, model = batch(length), read_gpt2(folder)
  ours = DecoderLM(model.config, VOCAB, PAD)
  found = jax.jit(ours.apply)({"params": model.params}, Text(jnp.asarray(tokens))).logits
  real = tokens != PAD
  np.testing.assert_allclose(found[real], logits_of(theirs, tokens)[real], atol=1e-4)


def test_the_exported_model_gives_the_same_logits(theirs, folder, tmp_path):
  write_gpt2(tmp_path / "out", read_gpt2(folder), eos=PAD)
  again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out").eval()
  tokens = batch(40)
  np.testing.assert_array_equal(logits_of(again, tokens), logits_of(theirs, tokens))


def test_it_is_a_vanilla_set_whose_own_head_gives_the_same_logits(theirs, folder):
  model = read_gpt2(folder)
  config = NemotConfig(modulatory_layers=1, output_layers=1, **vanilla_sizes(model.config))
  ours = Nemot(config, VOCAB + 3, PAD)
  tokens = jnp.asarray(batch(70))
  text = Text(tokens, jnp.asarray([config.auxiliary_ids("dec", "lm")] * 2))
  fresh = nn.unbox(ours.init(jax.random.key(0), text, [("lm", 2)], vanilla_logits=True))["params"]
  params = as_vanilla_set(model, config, fresh)
  assert jax.tree.structure(params) == jax.tree.structure(fresh)
  assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, fresh)
  out = ours.apply({"params": params}, text, [("lm", 2)], vanilla_logits=True)
  real = np.asarray(tokens) != PAD
  expected = logits_of(theirs, np.asarray(tokens))
  np.testing.assert_allclose(out.vanilla[..., :VOCAB][real], expected[real], atol=1e-4)


def test_generation_with_the_cache_gives_their_tokens(theirs, folder):
  model = read_gpt2(folder)
  ours = DecoderLM(model.config, VOCAB, PAD)
  prompt = batch(9)
  prompt[1] = np.random.default_rng(5).integers(0, PAD, 9)
  prompt[:, -1] = 7  # the walk starts every row from one token
  params = {"params": jax.tree.map(jnp.asarray, model.params)}
  cache = ours.apply(
    params, Text(jnp.asarray(prompt[:, :-1])), beams=1, length=20, method="prefill"
  )

  def step(cache, tokens):
    return ours.apply(params, cache, tokens, method="step")

  found = jax.jit(
    lambda cache: (
      greedy(
        step, cache, batch=2, max_length=20, limit=jnp.asarray([20, 20]), bos=7, eos=PAD, pad=PAD
      ).tokens
    )
  )(cache)
  with torch.no_grad():
    expected = theirs.generate(
      torch.tensor(prompt), max_new_tokens=20, do_sample=False, pad_token_id=PAD
    )[:, 9:].numpy()
  for mine, other in zip(np.asarray(found)[:, 0], expected, strict=True):
    stop = list(other).index(PAD) if PAD in other else 19  # the last is the end token at the limit
    np.testing.assert_array_equal(mine[:stop], other[:stop])


@pytest.mark.parametrize(
  "options", [{}, {"beams": 4, "n_best": 4}, {"beams": 3, "length_penalty": 0.5}]
)
def test_generate_gives_their_texts_and_scores(theirs, folder, options):
  """Greedily and by beam search, in batches with a cache; theirs one prompt at a time."""
  given, length = read_gpt2(folder), 12
  words = [f"w{number}" for number in range(4, VOCAB)]
  files = {FILE: Words(words).to_bytes()}
  task = CausalLMConfig(length=65, batch_tokens=65).build(given.config, files=files)
  tokenizer, params = task.dataset.tokenizer, jax.tree.map(jnp.asarray, given.params)
  random = np.random.default_rng(2)
  prompts = [" ".join(random.choice(words, count)) for count in (3, 11, 0, 6, 1, 20)]
  config = for_generation(options)
  found = task.generator(task.model, params, prompts, config, length=length)
  search = {"num_beams": 1}
  if config.method == "beam":
    search = {
      "num_beams": config.beams,
      "num_return_sequences": config.n_best,
      "length_penalty": config.length_penalty,
      "early_stopping": True,
    }
  for prompt, mine in zip(prompts, found, strict=True):
    ids = [tokenizer.eos, *tokenizer.encode(prompt)]
    with torch.no_grad():
      other = theirs.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=length,
        do_sample=False,
        bos_token_id=tokenizer.eos,
        eos_token_id=tokenizer.eos,
        pad_token_id=tokenizer.pad,
        suppress_tokens=list(tokenizer.never_produced),
        output_scores=True,
        return_dict_in_generate=True,
        **search,
      )
    for n, one in enumerate(mine):
      expected = other.sequences[n, len(ids) :].numpy()
      np.testing.assert_array_equal(one.tokens, expected[: len(one.tokens)])
      # Where the padding token is 0, generate fills with the end token.
      assert set(expected[len(one.tokens) :]) <= {tokenizer.pad, tokenizer.eos}
      if config.method == "beam":
        assert one.score == pytest.approx(float(other.sequences_scores[n]), abs=1e-4)


def test_a_folder_that_transformers_wrote_is_imported_with_its_tokenizer(tmp_path):
  """Tokens and probabilities are theirs; those of the tokens that ours has besides are small."""
  letters = [*tokenizers.pre_tokenizers.ByteLevel.alphabet()]
  merges = ["t h", "Ġ th", "e r", "Ġth e", "i n", "o n"]
  pieces = [*sorted(letters), *(one.replace(" ", "") for one in merges), "<|endoftext|>"]
  (tmp_path / "gpt2").mkdir()
  (tmp_path / "gpt2" / files_of_gpt2.VOCAB).write_text(
    json.dumps({p: n for n, p in enumerate(pieces)})
  )
  (tmp_path / "gpt2" / files_of_gpt2.MERGES).write_text("\n".join(["#version: 0.2", *merges]))
  theirs, count = tmp_path / "theirs", 256 + 4 + 1
  write_random_gpt2(theirs, str(tmp_path / "gpt2"), tokens=count)
  assert not (theirs / files_of_gpt2.VOCAB).exists(), "the tokenizer is in one file"
  convert.main(["--huggingface", str(theirs), "--workdir", str(tmp_path / "ours")])
  ours, text = compmod_jax.load(tmp_path / "ours"), "The other one in there, thin."
  reader = transformers.AutoTokenizer.from_pretrained(theirs)
  tokenizer = ours.task.dataset.tokenizer
  ids = tokenizer.encode(text)
  assert ids == reader(text)["input_ids"]
  assert any(number >= 256 for number in ids)
  (scored,) = ours.score([text])
  model = transformers.GPT2LMHeadModel.from_pretrained(theirs).eval()
  given = [tokenizer.eos, *ids, tokenizer.eos]
  with torch.no_grad():
    logits = model(torch.tensor([given])).logits[0, :-1].double()
  expected = torch.log_softmax(logits, -1)[range(len(given) - 1), given[1:]].numpy()
  found = np.asarray(scored.log_probabilities)
  more = np.log1p(3 / count)  # the probability that the added tokens take, at most
  np.testing.assert_allclose(found, expected - more / 2, atol=more / 2 + 1e-4)
