"""Patching a live Hugging Face model, and generating with it.

`patch(model)` makes the norms, rotary embedding, MLPs and residual adds of a transformers model run on this package's
ops, on that instance only: modules change their class to a subclass of it, and nothing global is written but the name
of an attention in transformers' AttentionInterface, by which small models are watched. `register_attention()` writes
another one there, for models patched or not.
`patch` returns a `PatchHandle` that reports what runs and undoes it; `unpatch(model)` undoes it where there is no
handle, on a deep copy or a loaded pickle.

    patch.py     patch, unpatch, PatchHandle; report.py, what patch found and did; errors.py, why something is left
    _private.py  what is used of torch that is not public
    attention.py our attention as an implementation of transformers
    callers/     who asks for steps: model.generate(), our own generate, the forward of a patched model
    step/        a description becomes launches: composed, proved, recorded into graphs
    cache/       KVCache, and transformers' own cache around a step
    model/       what a model computes, as data; whether its modules may be left uncalled; their adapters
    modules/     what runs in the place of a module's forward: norms, rotations, MLPs, LoRA, the loss
    classes/     what a class computes, found out by running it, and whether that is all that it does

A folder imports from those below it, never from those above. model.generate() and our generate() run their prompt by
step/prompt.py, of the same description, and each token by step/decode.py; forwards of prompts on a GPU do, too. How a
call of a patched model becomes launches:

    model(ids, past_key_values=cache)
      callers/forward.py     few tokens behind a cache? --no--> the model's modules (modules/)
      step/program.py        buffers and graphs for as many sequences and tokens, which caches of one shape share
      step/decode.py         the model's Decoder: is there a graph for the shape of this cache (step/place.py)?
        yes                    replay it; meanwhile step/guard.py: is the model what its description was read from?
                               if not, the result is dropped, and the call goes on as without a graph
        no                     the description, if it still holds; else step/describe.py makes it:
          model/reference.py     the modules as their class makes them of the config, but for those that tokens alone
                                 do not reach (model/text.py); classes/effects.py: those from
                                 outside of transformers do nothing but compute
          step/guard.py          each module of the model is as in the reference
          step/proof.py          a small model of the same class is run, once:
            model/observe.py       a graph of what its logits are made of
            model/read.py          norms, products, rotations, windows -> model/template.py
                                   the template gives the logits of the small model, or there is no step
          model/bind.py          the template with the weights and numbers of this model -> model/description.py
          step/packing.py        q|k|v and gate|up become one weight each
        cache/adopted.py       the first time: the layers of the caller's cache become buffers
      step/compose.py        per layer: norm, product, attention (step/attend.py), product, add, norm, gated MLP;
                             and the logits
      step/graphs.py         on CUDA these launches are recorded once, and replayed from then on, by whichever cache

      step/fp8.py            prompts of patch(model, fp8=True): the description with weights in FP8

    model(ids), on a GPU
      step/block.py          has a prompt of this size run before?
        yes                    its graph is replayed, or step/prompt.py launches, into one block of memory; meanwhile
                               step/guard.py as above, and the cache's objects are made
        no                     the description as above, and a new cache: cache/adopted.py

    model.generate(ids), on a GPU
      callers/ahead.py       greedy search or sampling by a model that is known? its prompt is launched, while
                             transformers prepares the call; if the loop is called with anything else, it is dropped
      callers/loop.py        is the model known, and is the cache empty?
        yes                    the prompt is launched, if it was not; meanwhile step/guard.py and callers/positions.py
                               look at model, ids and mask; where they do not hold, the call begins once more
        no                     they look first
      step/prompt.py         the prompt, as above
      step/decode.py         a step per token; callers/reading.py: the token is read while the next step runs

    model.generate_batch(requests)
      callers/batches.py     what the scheduler of transformers has put together: tokens of many requests, and the pages
                             of their keys and values
      step/batch.py          one token of each: a step over the pages, by a graph; else op by op

Importing this package imports transformers. `import llmkernels` does not: it imports this package when it is needed.
"""

from llmkernels._paged_cache import OutOfPages, PagedKVCache

from .attention import register_attention
from .cache.kv_cache import KVCache
from .callers.generate import generate
from .patch import PatchHandle, patch, unpatch
from .step.decode import release

__all__ = [
    "KVCache",
    "OutOfPages",
    "PagedKVCache",
    "PatchHandle",
    "generate",
    "patch",
    "register_attention",
    "release",
    "unpatch",
]
