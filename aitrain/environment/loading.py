"""Find the user's environment, and import it.

Finding reads the file and runs none of it (the command line does that, so that a misspelt name is refused at once);
importing and constructing run it (the training process does that, before it loads a model).
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from aitrain.config import TrainConfig
from aitrain.errors import ConfigError, EnvironmentFailed, did_you_mean
from aitrain.packages import in_working_directory, installed

_PACKAGE = Path(__file__).resolve().parents[1]
BUNDLED = next(
    (folder for folder in (_PACKAGE / "envs", _PACKAGE.parent / "envs") if folder.is_dir()), _PACKAGE / "envs"
)
"""The example environments: beside the package in a checkout, inside it in a wheel."""


@dataclass(frozen=True)
class Source:
    """Where an environment comes from."""

    module: str
    file: Path | None
    class_name: str | None
    is_module: bool
    """Whether it was named as a module, not as a file."""


def find(config: TrainConfig) -> Source:
    """The environment's file, found without running any of the user's code.

    Raises:
        ConfigError: none is named, or there is no such module or file.
    """
    if config.rl_env_module is not None:
        return _find_module("rl_env_module", config.rl_env_module, config.rl_env_class)
    if config.rl_env is None:
        raise ConfigError(
            "rl_env: which environment? Name yours with --rl-env path/to/file.py:Class, or with --rl-env-module and"
            f" --rl-env-class.\nBundled ones to try: {', '.join(bundled_modules())}"
        )
    place, _, class_name = config.rl_env.partition(":")
    wanted = class_name or config.rl_env_class
    if place.endswith(".py"):
        return _find_file(place, wanted)
    _refuse_path(place)
    return _find_module("rl_env", place, wanted)


def bundled_modules() -> list[str]:
    """Names of the example environments that come with aitrain."""
    return [f"envs.{file.stem}" for file in sorted(BUNDLED.glob("*.py"))]


def _find_file(place: str, class_name: str | None) -> Source:
    file = Path(place).expanduser()
    if file.is_dir():
        raise ConfigError(f"rl_env: {place} is a folder, not a file")
    if not file.is_file():
        near = did_you_mean(file.name, [other.name for other in file.parent.glob("*.py")])
        raise ConfigError(f"rl_env: there is no file {place} (looked from {Path.cwd()}).{near}")
    return Source(f"aitrain_environment_{file.stem}", file.resolve(), class_name, is_module=False)


def _refuse_path(place: str) -> None:
    """A path that names no Python file."""
    path = Path(place).expanduser()
    if path.is_dir() and ("/" in place or place.startswith(".")):
        raise ConfigError(f"rl_env: {place} is a folder\nName the file in it: --rl-env {_a_file_in(path)}:Class")
    if path.suffix == ".ipynb":
        raise ConfigError(
            f"rl_env: {place} is a notebook\nIn it, call aitrain.train(config, environment=...); or put the class into"
            " a .py file."
        )
    if path.is_file() or "/" in place or place.startswith((".", "~")):
        raise ConfigError(f"rl_env: {place} does not end in .py\nName a Python file: --rl-env path/to/file.py:Class")


def _a_file_in(folder: Path) -> Path:
    return next(iter(sorted(folder.glob("*.py"))), folder / "file.py")


def _find_module(knob: str, module: str, class_name: str | None) -> Source:
    if not all(part.isidentifier() for part in module.split(".")) or module.endswith(".py"):
        raise ConfigError(
            f"{knob}: {module} is not the name of a module, like package.module\n"
            "A file is named with --rl-env path/to/file.py:Class"
        )
    chain = _specs(module)
    if chain:
        _refuse_library_name(knob, module, chain[0])
        _refuse_folder(knob, module, chain[-1])
        readable = (chain[-1].origin or "").endswith(".py")
        return Source(module, Path(str(chain[-1].origin)) if readable else None, class_name, is_module=True)
    if module in bundled_modules():
        return Source(module, BUNDLED / f"{module.removeprefix('envs.')}.py", class_name, is_module=False)
    raise ConfigError(
        f"{knob}: there is no module {module} (looked in {Path.cwd()} and among the installed packages)."
        f"{did_you_mean(module, [*_modules_here(), *bundled_modules()])}\nBundled ones: {', '.join(bundled_modules())}"
    )


def _specs(module: str) -> list[ModuleSpec]:
    """The packages on the way to a module and the module itself, none of them imported: that would run the user's
    code. The working directory comes first: an installed package called `tests` does not hide the user's own."""
    top, *rest = module.split(".")
    chains = [_down(spec, rest) for spec in (in_working_directory(top), installed(top)) if spec is not None]
    found = [chain for chain in chains if len(chain) == len(rest) + 1]
    return next((chain for chain in found if chain[-1].origin is not None), found[0] if found else [])


def _down(spec: ModuleSpec, names: list[str]) -> list[ModuleSpec]:
    chain = [spec]
    for name in names:
        below = PathFinder.find_spec(f"{chain[-1].name}.{name}", list(chain[-1].submodule_search_locations or []))
        if below is None:
            break
        chain.append(below)
    return chain


def _refuse_folder(knob: str, module: str, spec: ModuleSpec) -> None:
    if spec.origin is None:
        folder = Path(next(iter(spec.submodule_search_locations or [module])))
        raise ConfigError(
            f"{knob}: {module} is a folder, not a module\nName the module in it: {module}.{_a_file_in(folder).stem}"
        )


_NEEDED = {
    "accelerate", "aitrain", "annotated_types", "datasets", "huggingface_hub", "numpy", "peft", "pydantic", "rich",
    "safetensors", "tokenizers", "torch", "transformers", "trl", "typer", "vllm", "yaml",
}  # fmt: skip
"""Libraries that a training process imports by name."""


def _refuse_library_name(knob: str, module: str, top: ModuleSpec) -> None:
    """Two modules cannot have one name: with the user's `datasets`, the library of that name is gone."""
    is_own = in_working_directory(top.name) == top
    if is_own and (top.name in sys.stdlib_module_names or top.name in _NEEDED):
        file = f"{module.replace('.', '/')}.py"
        raise ConfigError(
            f"{knob}: {module} begins with the name of the library {top.name}, which training needs\n"
            f"Rename {top.name}, or name the file: --rl-env {file}"
        )


def _modules_here() -> list[str]:
    here = Path.cwd()
    files = [*here.glob("*.py"), *here.glob("*/*.py")]
    return [".".join(file.relative_to(here).with_suffix("").parts) for file in files]


# -- reading: what the file shows without being run


def check_by_reading(source: Source, keywords: Mapping[str, Any]) -> None:
    """Refuse a class or constructor keyword that the file plainly does not have.

    Raises:
        ConfigError: no such class, two candidates, or a keyword that the constructor does not take.
        EnvironmentFailed: the file is not Python.
    """
    if source.file is None:
        return
    tree = _parse(source.file)
    classes = {node.name: node for node in _top_level(tree) if isinstance(node, ast.ClassDef)}
    name = source.class_name or _only_candidate(source, classes)
    if name is None:
        return
    if name in classes:
        _check_keywords(classes[name], keywords)
    elif name not in _names(tree) and not _has_star_import(tree):
        raise ConfigError(_no_such_class(source, name, list(classes)))


def _parse(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_bytes(), filename=str(file))
    except SyntaxError as error:
        line = f", line {error.lineno}" if error.lineno else ""
        raise EnvironmentFailed(f"{file}{line}: {type(error).__name__}: {error.msg}") from None
    except (OSError, ValueError) as error:
        raise EnvironmentFailed(f"{file} cannot be read: {error}") from None


def _top_level(tree: ast.AST) -> Iterator[ast.AST]:
    """The module's own statements, those inside `if` and `try` included."""
    for node in ast.iter_child_nodes(tree):
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.ExceptHandler, ast.With)):
            yield from _top_level(node)


def _only_candidate(source: Source, classes: Mapping[str, ast.ClassDef]) -> str | None:
    """The class that is meant when none is named; None where only running the file can tell."""
    public = {name: node for name, node in classes.items() if not name.startswith("_")}
    candidates = [name for name, node in public.items() if _has_method(node, "build_dataset", classes)]
    if len(candidates) > 1:
        raise ConfigError(_several(str(source.file), candidates))
    if candidates:
        return candidates[0]
    if any(_inherits_from_elsewhere(node, classes) for node in public.values()):
        return None
    raise ConfigError(
        f"rl_env_class: no class in {source.file} has build_dataset (classes there: {', '.join(classes) or 'none'}).\n"
        "Write one, or name a class that is imported there with --rl-env-class."
    )


def _several(place: str, names: list[str]) -> str:
    return (
        f"rl_env_class: {place} has {len(names)} environments: {', '.join(names)}\n"
        f"Say which one, such as --rl-env-class {names[-1]}"
    )


def _inherits_from_elsewhere(node: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> bool:
    return any(not isinstance(base, ast.Name) or base.id not in {*classes, "object"} for base in node.bases)


def _has_method(node: ast.ClassDef, method: str, classes: Mapping[str, ast.ClassDef]) -> bool:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    if any(isinstance(item, functions) and item.name == method for item in node.body):
        return True
    bases = [base.id for base in node.bases if isinstance(base, ast.Name) and base.id != node.name]
    return any(_has_method(classes[base], method, classes) for base in bases if base in classes)


def _check_keywords(node: ast.ClassDef, keywords: Mapping[str, Any]) -> None:
    init = next((item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"), None)
    if init is None or node.decorator_list or init.args.kwarg or init.args.vararg:
        return  # inherited, made by a decorator, or taking anything: the training process will tell
    positional = [argument.arg for argument in init.args.posonlyargs + init.args.args][1:]
    if init.args.posonlyargs[1:]:
        return
    taken = positional + [argument.arg for argument in init.args.kwonlyargs]
    needed = positional[: len(positional) - len(init.args.defaults)]
    needed += [a.arg for a, default in zip(init.args.kwonlyargs, init.args.kw_defaults, strict=True) if default is None]
    refuse_keywords(node.name, keywords, (taken, needed))


def refuse_keywords(name: str, keywords: Mapping[str, Any], signature: tuple[list[str], list[str]]) -> None:
    """Compare the keywords with (those that the constructor takes, those that it needs).

    Raises:
        ConfigError: one is not taken, or a needed one is missing.
    """
    taken, needed = signature
    for keyword in keywords:
        if keyword not in taken:
            raise ConfigError(
                f"rl_env_config: {name} does not take {keyword}.{did_you_mean(keyword, taken)}\n"
                f"It takes: {', '.join(taken) or 'nothing'}"
            )
    missing = [keyword for keyword in needed if keyword not in keywords]
    if missing:
        raise ConfigError(
            f"rl_env_config: {name} also needs {', '.join(missing)}.\n"
            f"Say it with --rl-env-config '{{\"{missing[0]}\": ...}}'"
        )


def _names(tree: ast.Module) -> set[str]:
    names = set()
    for node in _top_level(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def _has_star_import(tree: ast.Module) -> bool:
    imports = [node for node in _top_level(tree) if isinstance(node, ast.ImportFrom)]
    return any(alias.name == "*" for node in imports for alias in node.names)


def _no_such_class(source: Source, name: str, classes: list[str]) -> str:
    return (
        f"rl_env_class: there is no class {name} in {source.file}.{did_you_mean(name, classes)}\n"
        f"Classes there: {', '.join(classes) or 'none'}"
    )


# -- importing: from here on the user's code runs


def load(source: Source, keywords: Mapping[str, Any]) -> object:
    """The environment, imported and constructed.

    Raises:
        ConfigError: no such class, or keywords that its constructor does not take.
        EnvironmentFailed: its module or its constructor raised; with the user's own line.
    """
    module = _import(source)
    name = source.class_name or _only_class(source, module)
    if not hasattr(module, name):
        classes = [key for key, value in vars(module).items() if inspect.isclass(value)]
        raise ConfigError(_no_such_class(source, name, classes))
    made_from = getattr(module, name)
    if not callable(made_from):
        raise ConfigError(f"rl_env_class: {name} in {source.file or source.module} is not a class, but {made_from!r}")
    return _construct(made_from, name, keywords)


def _import(source: Source) -> ModuleType:
    _allow_sibling_imports(source)
    try:
        return _import_module(source.module) if source.is_module else _import_file(source)
    except (Exception, SystemExit) as error:
        raise EnvironmentFailed(failure("The environment's module cannot be imported", error)) from error


def _allow_sibling_imports(source: Source) -> None:
    """At the end of the path, so that a user's folder named like a library does not hide the library."""
    own = Path.cwd() if source.is_module or source.file is None else source.file.parent
    for folder in (str(own), str(Path.cwd())):
        if folder not in sys.path:
            sys.path.append(folder)


def _import_module(name: str) -> ModuleType:
    if name.partition(".")[0] not in sys.modules:
        _execute(_specs(name)[0])
    return importlib.import_module(name)


def _import_file(source: Source) -> ModuleType:
    spec = importlib.util.spec_from_file_location(source.module, source.file)
    assert spec is not None  # a file that ends in .py always has a loader
    return _execute(spec)


def _execute(spec: ModuleSpec) -> ModuleType:
    """Registered before it runs: dataclasses and pickle look a module up by its name."""
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        if spec.loader is not None:
            spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(spec.name, None)
        raise
    return module


def _only_class(source: Source, module: ModuleType) -> str:
    found = [
        name
        for name, value in vars(module).items()
        if inspect.isclass(value) and value.__module__ == module.__name__ and hasattr(value, "build_dataset")
    ]
    found = [name for name in found if not name.startswith("_")]
    place = str(source.file or source.module)
    if len(found) > 1:
        raise ConfigError(_several(place, found))
    if not found:
        raise ConfigError(f"rl_env_class: no class in {place} has build_dataset\nName one with --rl-env-class.")
    return found[0]


def _construct(made_from: Any, name: str, keywords: Mapping[str, Any]) -> object:
    _check_signature(made_from, name, keywords)
    try:
        return made_from(**keywords)
    except (Exception, SystemExit) as error:
        given = ", ".join(f"{key}=..." for key in keywords)
        raise EnvironmentFailed(failure(f"{name}({given}) raised", error)) from error


def _check_signature(made_from: Any, name: str, keywords: Mapping[str, Any]) -> None:
    try:
        parameters = list(inspect.signature(made_from).parameters.values())
    except (TypeError, ValueError):
        return  # no signature to be had: the call will tell
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    named = [p for p in parameters if p.kind is not p.VAR_POSITIONAL]
    refuse_keywords(name, keywords, ([p.name for p in named], [p.name for p in named if p.default is p.empty]))


# -- saying where the user's code failed


def failure(what: str, error: BaseException) -> str:
    """`score_episode raised: ValueError: no such city`, the user's own line, and what to do where we know it."""
    return "\n".join(line for line in (f"{what}: {describe(error)}", _where(error), _remedy(error)) if line)


def describe(error: BaseException) -> str:
    """`ValueError: no such city`, on one line, not too long."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300].rstrip(": ")


def _where(error: BaseException) -> str:
    """The user's own line that failed: `at hotel.py, line 12, in score_episode: return 1 / 0`."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _is_library(frame.filename)]
    if isinstance(error, SyntaxError) and error.filename:
        return f"at {error.filename}, line {error.lineno}: {(error.text or '').strip()}"
    if not own:
        return ""
    return f"at {own[-1].filename}, line {own[-1].lineno}, in {own[-1].name}: {own[-1].line}"


def _remedy(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"Install {error.name}, or correct the import."
    if isinstance(error, ImportError) and "no known parent package" in str(error):
        return "Name it as a module, so that Python knows its package: --rl-env-module package.module"
    return ""


def _is_library(filename: str) -> bool:
    in_package = Path(filename).is_relative_to(_PACKAGE) and not Path(filename).is_relative_to(BUNDLED)
    return in_package or filename.startswith("<") or "site-packages" in filename or _is_standard(filename)


def _is_standard(filename: str) -> bool:
    return Path(filename).is_relative_to(Path(traceback.__file__).parent)
