import gc
import logging
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: small operations on two threads wait for each other

import attnlab.torchvision_schemas  # noqa: F401  (before lightning, in whichever test comes first)

import pytest
import torch

if not torch.cuda.is_available():  # before anything imports triton: its kernels are tested in its interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def corpora() -> Path:
    """The folder of real corpora: ATTNLAB_CORPORA, else ../shared/data beside the checkout; without either, skip."""
    root = Path(os.environ.get("ATTNLAB_CORPORA", Path(__file__).parents[2] / "shared" / "data"))
    if not root.is_dir():
        pytest.skip(f"no real corpora: {root} is no directory; set ATTNLAB_CORPORA")
    return root


@pytest.fixture(scope="session", autouse=True)
def _environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No environment variable of the person who runs the tests reaches a command line."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("DATA_ROOT", "HYDRA_FULL_ERROR", "LOCAL_RANK", "RANK", "WORLD_SIZE"):
            patch.delenv(name, raising=False)
        patch.setenv("ATTNLAB_STAMP", "test")
        patch.setenv("HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))  # of this process alone
        yield


@pytest.fixture(autouse=True)
def _loggers() -> Iterator[None]:
    """Undo what the test before, or a library in it, has done to the project's loggers and to its environment."""
    yield
    if "transformers_modules" in sys.modules:  # code of an exported folder, which a test has copied to its own place
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
            del sys.modules[name]
    os.environ["ATTNLAB_STAMP"] = "test"  # the command itself sets when it began
    logging.disable(logging.NOTSET)
    logging.getLogger().setLevel(logging.WARNING)
    for handler in logging.getLogger().handlers:  # a rank other than zero prints errors only
        handler.setLevel(logging.NOTSET)
    for name, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and name.partition(".")[0] == "attnlab":
            logger.disabled, logger.propagate, logger.level = False, True, logging.NOTSET


MANY = {  # tests of many cases that take the same path: two of three cases are slow
    "test_a_cache_without_rows", "test_a_child_ends_with_its_killed_parent", "test_a_command_composes",
    "test_a_folder_gives_the_model_back_to_the_bit", "test_a_long_bfloat16_decode_keeps_counting", "test_a_method",
    "test_a_rate_of_multiply_adds_is_kept_by_the_largest_rank", "test_a_table", "test_a_whole_run_and_its_checkpoint",
    "test_a_wrong_file_is_found_as_a_wrong_command_line_is", "test_after_any_operations_extend_equals_recomputation",
    "test_alone_and_in_a_padded_batch_are_the_same", "test_checks_pass_in_every_precision", "test_commands_are_right",
    "test_compiled_steps_equal_eager_steps", "test_crop_to_the_beginning_of_a_slot_and_an_error_elsewhere",
    "test_empty_texts_give_empty_tensors", "test_equals_a_dense_softmax_across_blocks", "test_equals_one_dense_softmax",
    "test_equals_the_equations_past_the_window", "test_every_hardware_has_the_same_keys",
    "test_extend_by_nothing_changes_nothing", "test_extend_in_any_chunking_equals_forward",
    "test_extend_in_low_precision", "test_full_rank_is_exact",
    "test_layers_follow_the_pattern_and_counts_follow_the_layers", "test_learns_and_decodes",
    "test_logits_hundreds_apart_stay_exact", "test_losses_are_as_before", "test_mode_evaluate",
    "test_multiply_adds_of_a_step_are_as_counted", "test_one_two_four_and_eight_devices_train_every_recipe",
    "test_options_equal_the_equations_forward_backward_and_cached", "test_overlay", "test_parallel", "test_precisions",
    "test_row", "test_specification", "test_static_steps_equal_others", "test_steps", "test_stored_saved_and_trained",
    "test_the_correction_never_costs_more", "test_the_error_of_a_step_does_not_grow_with_its_position",
    "test_the_factors_compute_what_their_matrices_do", "test_the_loop_is_the_layer", "test_totals_of_the_other_tasks",
    "test_what_is_wrong_is_one_line", "test_whole_models_of_every_kind_of_task", "test_wrong_settings",
}  # fmt: skip


def _is_mla_besides(item: pytest.Item) -> bool:
    """A case of `mla_window` whose texts are shorter than the window, or that is about what mechanisms are used for.

    It takes the paths of `mla` and `sliding_window`, whose cases are not slow.
    """
    case = item.name.partition("[")[2]
    if "mla_window" not in case or item.path.name == "test_closed_forms.py":
        return False
    return "mla_window-w" not in case or item.path.parent.name != "attention"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen: Counter[str] = Counter()
    for item in items:
        name = getattr(item, "originalname", "")
        if _is_mla_besides(item):
            item.add_marker(pytest.mark.slow)
        elif name in MANY:
            if seen[name] % 3:
                item.add_marker(pytest.mark.slow)
            seen[name] += 1
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_collection_finish() -> None:
    """Keep the modules' objects out of garbage collection: composing makes many objects and starts it often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


@pytest.fixture(scope="session", autouse=True)
def _default_signals() -> None:
    """nohup ignores SIGHUP and `&` in a script SIGINT; the tests, and the processes that they start, need neither."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
