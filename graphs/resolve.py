"""GRAPH on the command line → `Graph`, by the rules of Dynamo 0.3's `dynamo serve`.

graphs.disagg             the one component of the module that no other needs
graphs.disagg:Frontend    that component and all it needs
graphs.disagg:Frontend.DecodeWorker   walk along needs
path/to/file.py[:Name]    the same from a file
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from graphs.graph import Component, Graph, reachable
from wavepp_worker.base.errors import ConfigError
from wavepp_worker.config.load import suggest


def resolve(spec: str, working_dir: Path, service_name: str = "") -> Graph:
    """Return the graph that `spec` names, importing its module from `working_dir` first.

    Args:
        service_name: keep only this component, without what it needs.

    Raises:
        ConfigError: no such module or component, or no unique root.
    """
    module_name, _, attribute = spec.partition(":")
    module = _import(module_name, working_dir.resolve())
    root = _walk(module, attribute) if attribute else _root(module, module_name)
    components = reachable(root)
    sections = {c.name for c in (*components, *_components(module).values())}
    if service_name:
        names = [component.name for component in components]
        if service_name not in names:
            raise ConfigError(
                f'{spec}: no component "{service_name}"{suggest(service_name, names)}'
            )
        components = (components[names.index(service_name)],)
    return Graph(
        spec=spec,
        components=components,
        section_names=tuple(sorted(sections)),
        relate=getattr(module, "relate", lambda *_all: None),
    )


def _import(name: str, folder: Path) -> ModuleType:
    if name.endswith(".py"):
        return _import_file(folder / name)
    if not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(f"{name}: expected a module such as graphs.disagg, or path/to/file.py")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    _prefer(folder, name.partition(".")[0])
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise ConfigError(
                f"{name}: no such module here ({folder}); give a module such as graphs.disagg, "
                "or name its folder with --working-dir"
            ) from error
        raise ConfigError(f"{name}: cannot be imported: {error}") from error
    except ImportError as error:
        raise ConfigError(f"{name}: cannot be imported: {error}") from error


def _prefer(folder: Path, package: str) -> None:
    """Let a user's own `graphs` folder add modules to the package of that name loaded already."""
    local, loaded = str(folder / package), sys.modules.get(package)
    search: list[str] | None = getattr(loaded, "__path__", None)
    if search is not None and Path(local).is_dir() and local not in search:
        search.insert(0, local)


def _import_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"_graph_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ConfigError(f"{path}: no such graph file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _components(module: ModuleType) -> dict[str, Component]:
    return {name: value for name, value in vars(module).items() if isinstance(value, Component)}


def _root(module: ModuleType, name: str) -> Component:
    found = list({id(c): c for c in _components(module).values()}.values())
    needed = {id(n) for c in found for n in c.needs}
    roots = [component for component in found if id(component) not in needed]
    if len(roots) == 1:
        return roots[0]
    if not roots:
        raise ConfigError(f"{name}: defines no component, so it is not a graph")
    names = ", ".join(component.name for component in roots)
    raise ConfigError(f"{name}: several roots ({names}); choose one as {name}:{roots[0].name}")


def _walk(module: ModuleType, attribute: str) -> Component:
    first, *rest = attribute.split(".")
    known = _components(module)
    if first not in known:
        raise ConfigError(f'{module.__name__}: no component "{first}"{suggest(first, known)}')
    component = known[first]
    for part in rest:
        needs = {needed.name: needed for needed in component.needs}
        if part not in needs:
            raise ConfigError(f'{component.name} needs no "{part}"{suggest(part, needs)}')
        component = needs[part]
    return component
