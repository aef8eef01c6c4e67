"""Runs a verification: cases, comparison, the search for the cause, and the engine checks."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from torch import nn

from fastgen.compile.backends.choose import kernel_targets
from fastgen.compile.host import device as devices
from fastgen.compile.host.device import Device
from fastgen.errors import InvalidArgumentError
from fastgen.models.checkpoint import hub
from fastgen.models.checkpoint.builtins import BUILTINS
from fastgen.models.checkpoint.files import read_json_object
from fastgen.models.fingerprint import Fingerprint, fingerprint
from fastgen.models.recipe.recipe import Recipe
from fastgen.models.registry import registry
from fastgen.models.resolve.config_keys import HARMLESS, INERT
from fastgen.models.resolve.resolve import unread_keys
from fastgen.runtime.scheduling.policies.splitfuse import captured_sizes
from fastgen.verify.cases import Case, Cases, draw_prompts
from fastgen.verify.causes import find_cause
from fastgen.verify.compare import Comparer
from fastgen.verify.disagreement import COMPLAINT, PROBE, Comparison, node_at
from fastgen.verify.engine_checks import LARGEST_SIZE, EngineResult, engine_results
from fastgen.verify.reference import ModuleReference, Prompts, RecordedReference, Reference
from fastgen.verify.report import Finding, Report
from fastgen.verify.this_config import ThisConfig

Progress = Callable[[str], None]

_PLAINNESS: Final = ("numbers", "weights", "load", "nodes", "log-probabilities")
_ENOUGH_FAILED: Final = 3
_ENGINE_FOR: Final = 4
_ALL_SIZES_FOR: Final = 2
_FEW_SIZES: Final = (8, LARGEST_SIZE)


def verify(
    target: str | Path | Recipe,
    *,
    recipe: str | Path | Recipe | None = None,
    reference: nn.Module | type[Any] | str | Path | None = None,
    this_config: bool = False,
    configs: int = 20,
    seed: int = 0,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Report:
    """Compares a recipe with a reference over drawn configurations, and reports the first node that disagrees.

    ``target`` is a recipe (name, file or object) or a model (directory, built-in, hub id). For a model its own recipe
    is used unless ``recipe`` names another. Without a ``reference``, transformers makes ``configs`` tiny random-weight
    models of the architecture, drawn from ``seed``; if ``target`` is a model they keep its flags. With a ``reference``
    only the checkpoint in the directory ``target`` is compared. The reference is a module that computes the correct
    result, or a file of activations recorded from one (see :class:`fastgen.verify.reference.RecordedReference`).

    With ``this_config`` nothing is drawn: the model's own configuration is compared, shrunk where it is large (see
    :mod:`fastgen.verify.shrink`), and the names and shapes of its tensors. That says whether this checkpoint is
    described, and nothing of other checkpoints of its family.

    Generated kernels run on ``device``: those for the CPU, or with ``"cuda"`` those for that GPU. All else runs on the
    CPU.

    Raises :class:`fastgen.errors.FastgenError` if there is nothing to compare with.
    """
    if configs < 1:
        raise InvalidArgumentError(f"configs={configs}: at least one configuration is needed")
    kernels_on = devices.current(device)
    found, directory = _targets(target, recipe)
    if this_config and directory is None:
        raise InvalidArgumentError("this_config: a recipe has no configuration of its own; give the model's directory")
    if this_config and not (reference is None or isinstance(reference, type)):
        raise InvalidArgumentError("this_config: a reference is compared on the model's own configuration anyway")
    with tempfile.TemporaryDirectory(prefix="fastgen-verify-") as scratch:
        if this_config:
            assert directory is not None
            own = ThisConfig(directory, Path(scratch), seed=seed, model_class=reference)
            report = Verifier(own, kernels_on).verify(found, progress)
            report.shrunk = own.shrunk
            return report
        if reference is None or isinstance(reference, type):
            base = None if directory is None else read_json_object(directory / "config.json")
            cases = Cases(Path(scratch), num_configs=configs, seed=seed, base=base, model_class=reference)
            return Verifier(cases, kernels_on).verify(found, progress)
        if directory is None:
            raise InvalidArgumentError("a reference needs weights to compare with; give the model's directory")
        return Verifier(_OwnCase(directory, reference, seed), kernels_on).verify(found, progress)


class CaseSource(Protocol):
    """A source of cases for a recipe."""

    num_configs: int
    seed: int

    def of(self, recipe: Recipe) -> Iterable[Case]: ...


class Verifier:
    """Verifies one recipe after another; references and comparisons that several of them share are made once.
    Generated kernels run on ``device``, by default the CPU.
    """

    def __init__(self, cases: CaseSource, device: Device | None = None):
        self.cases, self.comparer, self.device = cases, Comparer(), device or devices.current("cpu")
        self._engine_agrees: dict[tuple[int, Fingerprint], list[EngineResult]] = {}

    def verify(self, recipe: Recipe, progress: Progress | None = None) -> Report:
        started = time.perf_counter()
        report = Report(recipe.name, str(recipe.file), list(recipe.architectures), self.cases.seed)
        made: list[_Made] = []
        for case in self.cases.of(recipe):
            _notify(progress, f"configuration {case.index + 1} of {self.cases.num_configs}: numbers and names")
            report.configs.append(case.config)
            made.append(_Made(case, self.comparer.read(recipe, case)))
        if _first_failed(made) is None:  # wrong names and shapes explain a mistake better than values: no need to run
            for each in made:
                _notify(progress, f"configuration {each.case.index + 1} of {self.cases.num_configs}: node by node")
                each.comparison = self.comparer.compare(recipe, each.case)
                if sum(other.comparison.disagreement is not None for other in made) == _ENOUGH_FAILED:
                    break
        for each in made:
            for check, count in each.comparison.counts.items():
                report.count(check, count, each.comparison.largest[check])
        failed = _first_failed(made)
        if failed is None:
            self._run_engine(recipe, made, report, progress)
        else:
            report.fail(self._finding(recipe, failed, made, progress))
        report.seconds = time.perf_counter() - started
        return report

    def _finding(self, recipe: Recipe, failed: _Made, made: list[_Made], progress: Progress | None) -> Finding:
        wrong = failed.comparison.disagreement
        assert wrong is not None
        _notify(progress, f"{wrong.node.path} disagrees; looking for the cause")
        others = [each.case for each in made if each is not failed]
        cause = find_cause(recipe, failed.comparison, failed.case, others, self.comparer)
        node = cause.node if cause else wrong.node
        if cause is None and (stray := self._stray(recipe, failed, made)):
            node = node_at(recipe, "requires")
            message = f"{wrong.message}; only if the file says {stray}, which the recipe does not mention"
            return Finding(wrong.check, message, node, failed.case.index, wrong.difference)
        return Finding(wrong.check, wrong.message, node, failed.case.index, wrong.difference, cause)

    def _stray(self, recipe: Recipe, failed: _Made, made: list[_Made]) -> str | None:
        """Returns a flag that the recipe does not mention and whose value separates agreeing from failing cases."""
        config = failed.case.config
        flags = {key for key in unread_keys(recipe, config) if isinstance(config.get(key), bool)}
        flags -= INERT | HARMLESS.keys() | set(recipe.schema.ignores.config)
        failing: list[dict[str, Any]] = []
        agreeing: list[dict[str, Any]] = []
        for each in made if flags else ():
            (failing if self._wrong(recipe, each) else agreeing).append(each.case.config)
        for key in sorted(flags):
            value = config[key]
            separates = all(each.get(key) is value for each in failing)
            if agreeing and separates and all(each.get(key) is not value for each in agreeing):
                return f"{key}: {str(value).lower()}"
        return None

    def _wrong(self, recipe: Recipe, made: _Made) -> bool:
        """Returns whether anything disagrees other than that some keys are not accounted for."""
        wrong = self.comparer.retry(recipe, made.case).disagreement
        return wrong is not None and not (wrong.key == COMPLAINT and wrong.node.path == "ignores")

    def _run_engine(self, recipe: Recipe, made: list[_Made], report: Report, progress: Progress | None) -> None:
        """Runs prompts alone, batched and in chunks: at all captured sizes for the first configurations, else
        at few.
        """
        for number, each in enumerate(made[:_ENGINE_FOR]):
            spec, logits = each.comparison.spec, each.case.trace.logits
            if spec is None or logits is None:
                continue
            _notify(progress, f"configuration {each.case.index + 1}: alone, together, in chunks")
            sizes = captured_sizes(LARGEST_SIZE) if number < _ALL_SIZES_FOR else _FEW_SIZES
            key = id(each.case), fingerprint(spec)
            if key not in self._engine_agrees:
                # kernels are built for one configuration only, since that takes seconds
                targets = kernel_targets(self.device) if number == 0 else ()
                results = engine_results(recipe, each.case, spec, logits, sizes, targets, str(self.device))
                self._engine_agrees[key] = list(results)
            for result in self._engine_agrees[key]:
                report.count(result.check, 1, result.difference)
                if result.problem is not None:
                    report.fail(Finding(result.check, result.problem, None, each.case.index, result.difference))
                    return


def _targets(target: str | Path | Recipe, recipe: str | Path | Recipe | None) -> tuple[Recipe, Path | None]:
    """Returns the recipe under test, and the model's directory if the target is a model."""
    if isinstance(target, Recipe):
        return target, None
    path = Path(target)
    is_recipe_file = path.suffix in (".yaml", ".yml")
    if not is_recipe_file and (path.is_dir() or str(target) in BUILTINS or recipe is not None or "/" in str(target)):
        directory = hub.locate(target)
        config = read_json_object(directory / "config.json")
        return registry.find_recipe(config, recipe=recipe, checkpoint_dir=directory), directory
    return registry.named_recipe(target), None


class _OwnCase:
    """The single case of a model on disk and the reference that the user gave for it."""

    num_configs = 1

    def __init__(self, directory: Path, reference: nn.Module | str | Path, seed: int):
        self.directory, self.reference, self.seed = directory, reference, seed

    def of(self, recipe: Recipe) -> Iterable[Case]:
        config = read_json_object(self.directory / "config.json")
        if isinstance(self.reference, nn.Module):
            reference: Reference = ModuleReference(self.reference)
            prompts: Prompts = draw_prompts(int(config.get("vocab_size", 32)), self.seed)
        else:
            reference = RecordedReference(self.reference)
            prompts = reference.prompts or []
        yield Case(0, self.directory, config, reference, prompts, reference.trace(prompts), {})


@dataclass
class _Made:
    """A case and the comparison of the recipe in it."""

    case: Case
    comparison: Comparison


def _first_failed(made: list[_Made]) -> _Made | None:
    """Returns the case with the most informative disagreement; the first of several equal ones."""
    failed = [each for each in made if each.comparison.disagreement is not None]
    return min(failed, key=_rank, default=None)


def _rank(made: _Made) -> tuple[bool, int, bool, int]:
    """Returns the sort key of a disagreement, the most informative first.

    Names and shapes are more informative than values, a module run alone more than one in the model, and unaccounted
    keys least of all. Of equal cases the fullest file is first, since it has the keys that the recipe may lack.
    """
    wrong = made.comparison.disagreement
    assert wrong is not None
    return (
        wrong.key == COMPLAINT and wrong.node.path == "ignores",
        _PLAINNESS.index(wrong.check),
        PROBE not in wrong.key,
        -len(made.case.config),
    )


def _notify(progress: Progress | None, what: str) -> None:
    if progress is not None:
        progress(what)
