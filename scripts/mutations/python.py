"""Mutations of Python: of rounding and of races, as those of the kernels."""

from .mutation import Mutation

PYTHON = [
    Mutation(
        "py_options_in_the_default_dtype",
        "top_p=0.999 is 1 where bfloat16 is the default dtype",
        "llmkernels/hf/callers/generate.py",
        'return torch.as_tensor(value, device="cpu", dtype=torch.float64) if tensor.is_floating_point() else tensor',
        "return tensor",
        "tests/test_generate_lean.py -k default_dtype",
    ),
    Mutation(
        "py_loss_is_rounded_before_it_is_scaled",
        "a gradient in float16 is divided by the rows and rounded before it is multiplied by the scale",
        "llmkernels/ops/cross_entropy.py",
        "_ops.cross_entropy_backward_(gradient, grad_loss, logits, *others, *ctx.options)",
        "_ops.cross_entropy_scale_(gradient, grad_loss)",
        "tests/test_cross_entropy.py -k 'grad_scaler'",
    ),
    Mutation(
        "py_adam_rounds_loaded_moments",
        "loaded moments have the dtype of the parameter",
        "llmkernels/optim/adam.py",
        "for name in _STATE if saved and own else ():",
        "for name in ():",
        "tests/test_optim_state.py -k 'moments_keep'",
    ),
    Mutation(
        "py_choices_of_one_writer_of_two",
        "two processes that write what they measured at the same time lose some of it",
        "llmkernels/_tune/files.py",
        "fcntl.flock(descriptor, fcntl.LOCK_EX)",
        "pass",
        "tests/test_autotune_files.py -k same_time",
    ),
    Mutation(
        "py_stale_prompt_is_kept",
        "a prompt that was launched before a look at the model is kept whatever the look finds",
        "llmkernels/hf/callers/loop.py",
        "holds = holds or self.holds()",
        "holds = True",
        "tests/test_generate_early.py -k has_changed",
    ),
    Mutation(
        "py_counters_of_a_step_that_raised",
        "after a step that raised, the host takes the counters on the device for what they were",
        "llmkernels/hf/cache/kv_cache.py",
        "        self._forget_counters()\n        yield\n",
        "        yield\n",
        "tests/test_kv_cache.py -k written_where_they_differ",
    ),
    Mutation(
        "py_token_of_the_next_step",
        "the streamer's copy of a token is of the graph's memory, which the next step writes over",
        "llmkernels/hf/callers/generate.py",
        "Reading(text.last(), choice.goes_on())",
        "Reading(tokens, choice.goes_on())",
        "tests/test_generate_early.py -k come_late -m gpu",
    ),
    Mutation(
        "py_sum_before_a_parallel_layer",
        "a sum is left to the next product where two branches read it",
        "llmkernels/hf/step/compose.py",
        "seen is None and not layer.parallel",
        "seen is None",
        "tests/test_rms_norm_add_linear.py -k two_kinds",
    ),
]
