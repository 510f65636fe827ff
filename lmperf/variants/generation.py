"""The generation axis: how tokens are decoded, greedily.  All but `int8_weights` give the tokens of `no_cache`."""

from __future__ import annotations

from torch import nn

from lmperf.implementations import decoding
from lmperf.implementations.continuous import ContinuousBatch
from lmperf.implementations.prefix_cache import WithPrefixCache
from lmperf.implementations.quantisation import WeightOnlyLinear, replace_linears
from lmperf.recipe import BuildContext, Recipe, Stage, Transform
from lmperf.registry import variant


@variant("generation", baseline=True)
def no_cache(recipe: Recipe) -> Recipe:
    """Everything is computed again for each token."""
    return recipe


@variant("generation")
def dynamic_cache(recipe: Recipe) -> Recipe:
    """Keys and values of earlier tokens are kept in a cache that grows by concatenation."""
    return recipe.replace(generate=decoding.with_dynamic_cache)


@variant("generation")
def static_cache(recipe: Recipe) -> Recipe:
    """Keys and values are written into a cache allocated for the whole answer."""
    return recipe.replace(generate=decoding.with_static_cache)


@variant("generation", requires=("cxx",))
def static_compiled(recipe: Recipe) -> Recipe:
    """A static cache with the one-token step compiled once for all lengths."""
    return recipe.replace(generate=decoding.StaticCompiled())


@variant("generation")
def prefix_cache(recipe: Recipe) -> Recipe:
    """Keys and values of prompts seen before are used again, in verified blocks of 128 tokens."""
    return recipe.replace(generate=WithPrefixCache(block=128))


@variant("generation")
def prefix_cache_64(recipe: Recipe) -> Recipe:
    """The prefix cache with blocks of 64 tokens."""
    return recipe.replace(generate=WithPrefixCache(block=64))


@variant("generation")
def prefix_cache_96(recipe: Recipe) -> Recipe:
    """The prefix cache with blocks of 96 tokens."""
    return recipe.replace(generate=WithPrefixCache(block=96))


@variant("generation")
def prefix_cache_256(recipe: Recipe) -> Recipe:
    """The prefix cache with blocks of 256 tokens."""
    return recipe.replace(generate=WithPrefixCache(block=256))


@variant("generation", fidelity="quality")
def int8_weights(recipe: Recipe) -> Recipe:
    """The blocks' weights rounded to int8 after training, decoded with a growing cache."""
    convert = Transform(Stage.COMPRESSION, "int8_weights", weights_to_int8)
    return recipe.replace(generate=decoding.with_dynamic_cache).extend(finish=(convert,))


def weights_to_int8(model: nn.Module, context: BuildContext) -> nn.Module:
    """Replace the blocks' linear layers by ones that store int8 weights with one scale a row."""
    replace_linears(model.blocks, WeightOnlyLinear)
    return model


@variant("generation")
def prompt_lookup(recipe: Recipe) -> Recipe:
    """Several tokens at once are guessed from the text so far and checked in one pass."""
    return recipe.replace(generate=decoding.PromptLookup())


@variant("generation")
def continuous_batch(recipe: Recipe) -> Recipe:
    """Requests join and leave a running batch one by one."""
    return recipe.replace(generate=ContinuousBatch())
