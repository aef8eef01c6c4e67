"""The choice of a CPU's kernels in bf16: by measurements that the tests invent, kept, found again, and pinned."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

from fastgen.compile.backends.choose import arch_for, target_facts
from fastgen.compile.build.autotune import Measure
from fastgen.compile.build.cache import KernelCache
from fastgen.compile.build.cpp import CppBuilder, runnable_arches
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.build.tuned import kept
from fastgen.compile.host.device import AMX, Device, current
from fastgen.compile.ops.linear import bf16_tuning
from fastgen.compile.ops.linear.bf16_tuning import DOTS, PROBLEM, WIDENED, Bf16Choice, InTurns, bf16_choice

CPU = current("cpu")
SETS = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16")
HAS_CHOICE = pytest.mark.skipif(
    runnable_arches(CPU)[0] != DOTS, reason="CPUs have a choice with bf16 dots and without a matrix unit"
)


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("FASTGEN_CPP_ARCH", "FASTGEN_AUTOTUNE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FASTGEN_CACHE", str(tmp_path / "kernels"))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a cache that has the kernels of both ways, and no choice."""
    directory = tmp_path_factory.mktemp("built")
    with pytest.MonkeyPatch.context() as environment:
        environment.delenv("FASTGEN_AUTOTUNE")
        choice(KernelCache(directory), seconds(1.0, 1.0))
    shutil.rmtree(directory / ".tuning")
    return directory


@pytest.fixture
def cache(tmp_path: Path, built: Path) -> KernelCache:
    return KernelCache(shutil.copytree(built, tmp_path / "kernels"))


def seconds(*found: float) -> Measure:
    """Returns a measurement of both ways, the dots first, that finds these times."""
    times = iter(found)
    return lambda run: next(times)


def no_clock(run: Callable[[], None]) -> float:
    raise AssertionError("something is measured")


def choice(cache: KernelCache, measure: Measure, *, measures: bool = True) -> Bf16Choice | None:
    return bf16_choice(CPU, measures=measures, loader=KernelLoader(CppBuilder(DOTS), cache=cache), measure=measure)


# ---- the measurement


class Clock:
    """A clock of the tests: every run takes its time, times the machine's slowness just then."""

    def __init__(self, slowness: Iterable[float]):
        self.now, self._slowness = 0.0, iter(slowness)

    def __call__(self) -> float:
        return self.now

    def run(self, takes: float) -> Callable[[], None]:
        def run() -> None:
            self.now += takes * next(self._slowness)

        return run


@pytest.mark.parametrize("takes", [0.25, 1.0, 4.0])
def test_ways_that_take_turns_are_compared_at_the_same_speed(takes: float) -> None:
    """The machine becomes four times slower between the two, and in a third of the turns one of them is held up."""
    held_up = itertools.cycle([1.0, 1.0, 1.0, 9.0, 1.0, 1.0])
    clock = Clock(itertools.chain(itertools.repeat(1.0, 15), (4 * each for each in held_up)))
    measure = InTurns(clock)
    assert measure(clock.run(1.0)) == pytest.approx(1.0)
    assert measure(clock.run(takes)) == pytest.approx(takes)


def test_a_clock_that_stands_still_is_no_error() -> None:
    measure = InTurns(lambda: 0.0)
    assert measure(lambda: None) == measure(lambda: None) > 0


# ---- the choice


@HAS_CHOICE
@pytest.mark.parametrize(
    ("of_dots", "of_widened", "arch"), [(1.0, 2.0, DOTS), (1.0, 1.0, DOTS), (1.0, 0.91, DOTS), (1.0, 0.5, WIDENED)]
)
def test_the_dots_are_taken_unless_the_other_way_is_faster_by_a_tenth(
    cache: KernelCache, of_dots: float, of_widened: float, arch: str
) -> None:
    found = choice(cache, seconds(of_dots, of_widened))
    times = (of_dots, of_widened) if arch == WIDENED else (of_widened, of_dots)
    other = DOTS if arch == WIDENED else WIDENED
    assert found == Bf16Choice(arch, f"measured: {times[0] / times[1]:.2f} times as fast as {other}")
    assert choice(cache, no_clock) == found, "it is measured once for a cache"
    assert choice(cache, no_clock, measures=False) == found
    (row,) = kept(cache.directory)
    assert (row["device"], row["problem"], row["choice"]) == (CPU.name, PROBLEM, {"arch": arch})
    (file,) = (cache.directory / ".tuning").iterdir()
    ways = [way for way, _ in json.loads(file.read_text())["seconds"]]
    assert ways == [{"arch": DOTS}, {"arch": WIDENED}], "both ways computed the same"


@HAS_CHOICE
def test_unknown_choices_are_the_dots(cache: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = Bf16Choice(DOTS, "not measured")
    assert choice(cache, no_clock, measures=False) == unknown
    monkeypatch.setenv("FASTGEN_AUTOTUNE", "0")
    assert choice(cache, no_clock) == unknown


@HAS_CHOICE
@pytest.mark.parametrize("arch", [DOTS, WIDENED])
def test_the_variable_pins_it(cache: KernelCache, monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    choice(cache, seconds(1.0, 0.5) if arch == DOTS else seconds(1.0, 2.0))
    monkeypatch.setenv("FASTGEN_CPP_ARCH", arch)
    assert choice(cache, no_clock) == Bf16Choice(arch, "FASTGEN_CPP_ARCH")


@pytest.mark.parametrize(("sets", "arch"), [((*SETS, *AMX), "amx"), (SETS[:6], WIDENED), (SETS[:3], "avx2")])
def test_other_cpus_have_no_choice(monkeypatch: pytest.MonkeyPatch, sets: tuple[str, ...], arch: str) -> None:
    monkeypatch.setattr(bf16_tuning, "InTurns", lambda: no_clock)
    cpu = Device("cpu", "some", 1 << 30, instruction_sets=sets)
    assert bf16_choice(cpu, measures=True) is None
    assert arch_for(cpu, torch.bfloat16, measures=True) == arch
    if arch == WIDENED:
        monkeypatch.setenv("FASTGEN_CPP_ARCH", WIDENED)
        assert bf16_choice(cpu, measures=True) is None


@HAS_CHOICE
@pytest.mark.usefixtures("cache")
def test_engines_measure_and_what_describes_them_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def arch(**arguments: bool) -> str:
        return target_facts("cpp", CPU, num_threads=1, dtype=torch.bfloat16, **arguments).arch

    monkeypatch.setattr(bf16_tuning, "InTurns", lambda: no_clock)
    assert arch(measures=True, sealed=True) == arch() == DOTS
    monkeypatch.setattr(bf16_tuning, "InTurns", lambda: seconds(1.0, 0.5))
    assert arch(measures=True) == WIDENED
    assert arch() == WIDENED
    assert arch(sealed=True) == DOTS, "a bundle says what it was built for, and the cache is not read"


@HAS_CHOICE
def test_models_in_other_dtypes_measure_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bf16_tuning, "InTurns", lambda: no_clock)
    for dtype in (torch.float32, torch.float16, None):
        assert target_facts("cpp", CPU, num_threads=1, dtype=dtype, measures=True).arch == DOTS
