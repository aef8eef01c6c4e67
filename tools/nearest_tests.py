"""The tests nearest to a source: those that import it through the fewest other modules."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

# Tests that compare digests of rendered kernels: any change of a template fails them, right or wrong.
_LEFT_OUT = ("tests/compile/test_kernel_digests.py", "tests/compile/test_ahead_of_time.py")
_FOLDERS = ("tests/compile", "tests/layers", "tests/models", "tests/runtime", "tests/serving")


class Nearest:
    """The imports of a working tree, followed from a module to the tests."""

    def __init__(self, root: Path):
        files = [*(root / "fastgen").rglob("*.py"), *(root / "tests").rglob("*.py")]
        self._root = root
        self._files = {_module(file.relative_to(root)): file for file in files}
        templates = [*(root / "fastgen/compile").rglob("*.j2"), *(root / "fastgen/compile").rglob("*.h")]
        self._templates = {str(file.relative_to(root)): file.read_text(encoding="utf-8") for file in templates}
        self._importers: dict[str, set[str]] = defaultdict(set)
        for name, file in self._files.items():
            for imported in _imports(ast.parse(file.read_text(encoding="utf-8"))):
                self._importers[imported].add(name)

    def tests(self, path: str) -> list[str]:
        """Returns the test files that cover the source at ``path``: those whose names have the words of its name, then
        those that import it through the fewest modules, then those that import least.

        Going to a module that imports another is a step; helpers of tests are no step. A template belongs to the
        modules that make specs of it, and one that templates share to those of all that use it. An op's template has
        the name of its op and target.
        """
        starts = self._modules_of(path)
        distances, level = dict.fromkeys(starts, 0), list(starts)
        while level:
            following: list[str] = []
            for name in level:
                for importer in self._importers[name]:
                    distance = distances[name] + (not name.startswith("tests."))
                    if distance < distances.get(importer, 1 << 30):
                        distances[importer] = distance
                        following.append(importer)
            level = following
        words = {"triton" if path.endswith(".py.j2") else "cpp", Path(path).parts[-3]}
        if path.endswith(".py") or "/ops/" not in path:
            words = set(Path(path).name.split(".")[0].split("_"))
        found = [name for name in distances if self._is_test(name)]
        found.sort(
            key=lambda name: (not words <= set(name.split("_")), distances[name], self._breadth(name), name),
        )
        return [str(self._files[name].relative_to(self._root)) for name in found]

    def _modules_of(self, path: str) -> list[str]:
        if path.endswith(".py"):
            return [_module(Path(path))]
        target = "triton" if path.endswith(".py.j2") else "cpp"
        used = [path]
        for each in used:  # grows while it is read
            name = Path(each).name
            used += [user for user, text in self._templates.items() if name in text and user not in used]
        of_ops = {Path(each).parts for each in used if "/ops/" in each}
        return sorted({".".join((*parts[: parts.index("templates")], target)) for parts in of_ops})

    def _is_test(self, name: str) -> bool:
        path = str(self._files[name].relative_to(self._root))
        is_test = name.rsplit(".", 1)[-1].startswith("test_")
        return is_test and path.startswith(_FOLDERS) and path not in _LEFT_OUT

    def _breadth(self, name: str) -> int:
        tree = ast.parse(self._files[name].read_text(encoding="utf-8"))
        return sum(each.startswith(("fastgen.", "tests.")) for each in set(_imports(tree)))


def _module(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(tree: ast.Module) -> Iterator[str]:
    """Yields the modules that a source imports, and the names of what it imports from them, which may be modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{each.name}" for each in node.names)
