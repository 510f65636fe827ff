"""The design held in place: imports go one way, planning loads no torch, nothing dangerous is called."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "lmperf"

#: A module may import only from its own group or an earlier one.
LAYERS = [
    {"records", "progress", "design", "environments"},
    {"catalogue", "tables"},
    {"config", "sources", "corpus.state"},
    {"planning", "steps", "probing", "forecast", "workflow", "running"},
    {"flops", "datasheets", "machine", "provenance", "hoststate", "corpus"},
    {"reference"},
    {"recipe", "caching", "devices"},
    {"model"},
    {"registry", "kernels", "implementations", "scaling", "numerics"},
    {"variants"},
    {"workloads.base"},
    {"checking"},
    {"workloads"},
    {"utilisation", "memory", "timing"},
    {"failures", "sampling", "journal", "locking", "forkserver", "launching"},
    {"sessions", "stability", "schedule", "evaluation", "preparation", "training", "hotspots", "tracing", "profiling"},
    {"statistics"},
    {"readings"},
    {"startup", "plausibility"},
    {"comparing"},
    {"qualities", "precision_tables", "ladder", "evidence", "sweeps"},
    {"ablation", "claim_checks", "claims", "diffing"},
    {"qualify", "doctor"},
    {"quantities"},
    {"figures", "cards", "feeding", "nodes", "sweepviews"},
    {"views", "eventfiles", "bundling"},
    {"reporting"},
    {"stages"},
    {"cli"},
]
NO_TORCH = [
    "lmperf",
    "lmperf.workflow",
    "lmperf.planning",
    "lmperf.cli",
    "lmperf.steps",
    "lmperf.comparing",
    "lmperf.ablation",
    "lmperf.claims",
]


def layer(module: str) -> int | None:
    """The layer of a module: its own entry, else that of the nearest package above it."""
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        for number, names in enumerate(LAYERS):
            if ".".join(parts[:end]) in names:
                return number
    return None


def top_level_imports(path: Path):
    """lmperf modules that a file imports when it is imported (imports inside functions are lazy on purpose)."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "lmperf":
            base = node.module.removeprefix("lmperf").lstrip(".")
            yield from ([base] if base else [alias.name for alias in node.names])
        elif isinstance(node, ast.Import):
            yield from (a.name.removeprefix("lmperf.") for a in node.names if a.name.startswith("lmperf."))


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        if not name.endswith("__init__") and name != "__main__":
            yield name, path


def test_every_module_has_its_place():
    assert [name for name, _ in modules() if layer(name) is None] == []


def test_imports_go_one_way():
    wrong = []
    for name, path in modules():
        for other in top_level_imports(path):
            if other.startswith("__"):
                continue
            if layer(other) is not None and layer(name) is not None and layer(other) > layer(name):
                wrong.append(f"{name} imports {other}")
    assert wrong == []


@pytest.mark.parametrize("module", NO_TORCH)
def test_planning_loads_no_torch(module):
    code = f"import sys, {module}; sys.exit(1 if 'torch' in sys.modules else 0)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0, f"{module} imports torch"


def test_nothing_dangerous_is_called():
    found = []
    for name, path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                shell = any(k.arg == "shell" and getattr(k.value, "value", False) for k in node.keywords)
                if called in ("eval", "exec", "pickle.load", "pickle.loads", "yaml.load", "os.system") or shell:
                    found.append(f"{name}:{node.lineno} {called}")
                if called == "torch.load" and not any(k.arg == "weights_only" for k in node.keywords):
                    found.append(f"{name}:{node.lineno} torch.load without weights_only")
    assert found == []


def test_print_is_the_command_lines_alone():
    found = []
    for name, path in modules():
        calls = [n for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.Call)]
        found += [f"{name}:{c.lineno}" for c in calls if ast.unparse(c.func) == "print" and name != "cli"]
    assert found == []


def test_the_readme_names_every_module():
    text = (PACKAGE.parent / "README.md").read_text(encoding="utf-8")
    missing = [name for name, _ in modules() if "." not in name and f"{name}.py" not in text]
    assert missing == []
