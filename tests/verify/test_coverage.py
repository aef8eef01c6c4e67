"""Configurations are chosen so that their combinations of values differ, in the order of coverage."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import transformers

from fastgen.verify.cases import draws_of
from fastgen.verify.configs import is_filled_in, is_old, is_sparse
from fastgen.verify.coverage import Coverage, Series

FLAGS = ("a", "b", "c")
NO_DEFAULTS = dict.fromkeys(FLAGS)
ALL = [dict(zip(FLAGS, values, strict=True)) for values in product((False, True), repeat=3)]


def test_a_combination_counts_once() -> None:
    coverage = Coverage(ALL, NO_DEFAULTS)
    assert coverage.gain(ALL[0]) == coverage.gain(ALL[7]) > 0
    coverage.add(ALL[0])
    assert coverage.gain(ALL[0]) == 0
    assert coverage.gain(ALL[7]) > 0


def test_rare_combinations_count_less() -> None:
    configs = [{"a": a, "b": b, "c": c, "d": d} for a, b, c in product((0, 1), repeat=3) for d in range(5)]
    coverage = Coverage(configs, {**NO_DEFAULTS, "d": None})
    common = Coverage(ALL, NO_DEFAULTS).gain(ALL[0])
    assert common < coverage.gain(configs[0]) < 4 * common  # of four triples three hold the key of five values


def test_what_never_changes_counts_nothing() -> None:
    configs = [{**config, "same": 3} for config in ALL]
    with_constant = Coverage(configs, {**NO_DEFAULTS, "same": None})
    assert with_constant.gain(configs[0]) == Coverage(ALL, NO_DEFAULTS).gain(ALL[0])


def test_a_flag_left_out_shows_its_default_and_that_it_is_left_out() -> None:
    configs: list[dict[str, Any]] = [{**config, **flag} for config in ALL for flag in ({}, {"d": False}, {"d": True})]
    coverage = Coverage(configs, {**NO_DEFAULTS, "d": False})
    for config in (config for config in configs if config.get("d") is not False):
        coverage.add(config)
    stated = {**ALL[0], "d": False}
    left, same = coverage.gain(stated), coverage.gain(ALL[0])
    assert same == 0
    assert left > 0
    coverage.add(stated)
    assert coverage.gain(stated) == 0


def taken(series: Series, num_configs: int) -> list[dict[str, Any]]:
    places: tuple[tuple[int, int], ...] = ()
    for index in range(num_configs):
        places += ((index, series.order(index, places)[0]),)
    return [series.configs[index][attempt] for index, attempt in places]


def test_all_that_three_flags_of_falcon_can_say_together_comes_up() -> None:
    draws = draws_of(transformers.FalconForCausalLM, {"alibi", "bias", "parallel_attn"}, seed=0)
    series = Series(draws, 20)
    stated = [config for index, config in enumerate(taken(series, 20)) if not is_sparse(index)]
    for keys in combinations(("alibi", "bias", "multi_query", "parallel_attn"), 3):
        found = {tuple(config.get(key, draws.defaults[key]) for key in keys) for config in stated}
        assert len(found) == 8, (keys, found)


def test_files_are_of_four_kinds_in_turns() -> None:
    kinds = [(is_filled_in(index), is_sparse(index), is_old(index)) for index in range(8)]
    assert kinds[:4] == kinds[4:] == [(True, False, False), (False, True, False), (False,) * 3, (False, False, True)]


def test_a_number_of_layers_left_to_the_class_has_more_layers() -> None:
    draws = draws_of(transformers.Qwen2ForCausalLM, {"max_window_layers", "use_sliding_window", "layer_types"}, seed=0)
    configs = [draws.config(index, attempt) for index in range(2, 40, 4) for attempt in range(8)]
    left = [
        config
        for config in configs
        if config.get("use_sliding_window") and "max_window_layers" not in config and not config.get("layer_types")
    ]
    assert left
    assert all(config["num_hidden_layers"] == 30 for config in left)  # the class's own number is 28
    assert all(config["num_hidden_layers"] < 6 for config in configs if "max_window_layers" in config)
