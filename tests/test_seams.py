"""The machinery for seams, on toy modules: nothing of vLLM is imported here."""

from __future__ import annotations

import sys
import types
from abc import ABC, abstractmethod

import pytest

from vllm_lazy_grammar._seams import (
    AbstractMethods,
    Accepts,
    Exists,
    LooksUp,
    MissingTargetError,
    Offers,
    Parameters,
    Seam,
    Table,
    Target,
)
from vllm_lazy_grammar.errors import SeamError

TOY = """
from abc import ABC, abstractmethod
from typing import Literal

Colour = Literal["red", "green"]

class Manager:
    kind = "theirs"

class Engine:
    table = {"size": 3}

    def __init__(self):
        self.manager = Manager()

    def run(self, request, priority=0):
        return [self.step(request) for _ in range(1)]

    def step(self, request):
        return ("theirs", request)

    @staticmethod
    def flags(parser):
        return ["theirs", parser]

    @classmethod
    def made_by(cls):
        return ["theirs", cls.__name__]

class Derived(Engine):
    pass

class Shape(ABC):
    @abstractmethod
    def area(self): ...
    @abstractmethod
    def name(self): ...
"""


@pytest.fixture
def toy():
    module = types.ModuleType("toy_foreign")
    exec(TOY, module.__dict__)  # noqa: S102  (a constant of this file)
    sys.modules["toy_foreign"] = module
    yield module
    del sys.modules["toy_foreign"]


def at(path):
    return Target("toy_foreign", path)


def seam(path, replace, *checks, settle=None):
    return Seam(
        at(path), replace, why=f"{path} is wanted", until="the toy has a registry", checks=checks, settle=settle
    )


def table(*seams):
    return Table(seams, version=lambda: "toy 9.9", tested="toy 1.0 to 2.0", ways_out=["install toy 2.0", "do without"])


def subclass(current):
    return type("Ours", (current,), {"kind": "ours"})


def ours_first(current):
    def replacement(*args):
        return ["ours", *current(*args)]

    return replacement


def snapshot(module):
    return {
        "Manager": module.Manager,
        "step": vars(module.Engine)["step"],
        "flags": vars(module.Engine)["flags"].__func__,
        "made_by": vars(module.Engine)["made_by"].__func__,
        "table": dict(module.Engine.table),
    }


def test_an_installed_seam_is_reached_by_the_code_that_looks_the_name_up(toy):
    assert table(seam("Manager", subclass)).install()
    assert toy.Engine().manager.kind == "ours"


def test_the_replacement_is_made_from_what_is_bound_now(toy):
    table(seam("Engine.step", ours_first)).install()
    assert toy.Engine().step("r") == ["ours", "theirs", "r"]


def test_static_and_class_methods_stay_what_they_are(toy):
    table(seam("Engine.flags", ours_first), seam("Engine.made_by", ours_first)).install()
    assert toy.Engine().flags("p") == ["ours", "theirs", "p"]
    assert toy.Derived.made_by() == ["ours", "theirs", "Derived"]


def test_a_path_may_lead_through_items(toy):
    seams = table(seam("Engine.table[size]", lambda current: current + 1))
    seams.install()
    assert toy.Engine.table == {"size": 4}
    seams.uninstall()
    assert toy.Engine.table == {"size": 3}


def test_installing_twice_is_once(toy):
    seams = table(seam("Engine.flags", ours_first))
    assert seams.install()
    assert not seams.install()
    assert toy.Engine.flags("p") == ["ours", "theirs", "p"]


def test_uninstalling_restores_every_name(toy):
    before = snapshot(toy)
    seams = table(
        seam("Manager", subclass),
        seam("Engine.step", ours_first),
        seam("Engine.flags", ours_first),
        seam("Engine.made_by", ours_first),
    )
    seams.install()
    assert all(value is not before[name] for name, value in snapshot(toy).items() if name != "table")
    assert seams.uninstall()
    assert snapshot(toy) == before
    assert isinstance(vars(toy.Engine)["flags"], staticmethod)
    assert not seams.installed
    assert not seams.uninstall()


def test_it_can_be_installed_again_after_uninstalling(toy):
    seams = table(seam("Engine.flags", ours_first))
    seams.install()
    seams.uninstall()
    assert seams.install()
    assert toy.Engine.flags("p") == ["ours", "theirs", "p"]


def test_uninstalling_refuses_where_somebody_rebound_a_name_since_and_changes_nothing(toy):
    seams = table(seam("Manager", subclass), seam("Engine.step", ours_first))
    seams.install()
    toy.Engine.step = theirs = ours_first(toy.Engine.step)
    ours = toy.Manager
    with pytest.raises(SeamError, match=r"toy_foreign:Engine\.step"):
        seams.uninstall()
    assert toy.Manager is ours
    assert toy.Engine.step is theirs
    assert seams.installed


def test_a_mismatch_binds_nothing_and_names_everything_that_is_wrong(toy):
    before = snapshot(toy)
    seams = table(
        seam("Manager", subclass),
        seam("Engine.step", ours_first, Parameters(at("Engine.step"), ("self", "job"))),
        seam("Engine.gone", ours_first),
        seam("Engine.flags", ours_first, LooksUp(at("Engine.run"), "Manager")),
    )
    with pytest.raises(SeamError) as caught:
        seams.install()
    text = str(caught.value)
    for part in (
        "toy 9.9",
        "toy 1.0 to 2.0",
        "(self, job)",
        "(self, request)",
        "'gone'",
        "'Manager'",
        "Engine.step is wanted",
        "install toy 2.0",
    ):
        assert part in text
    assert snapshot(toy) == before
    assert not seams.installed


def test_a_module_that_can_not_be_imported_is_a_complaint():
    seams = table(Seam(Target("toy_nowhere", "x"), ours_first, why="x", until="never"))
    with pytest.raises(SeamError, match="toy_nowhere"):
        seams.install()


def test_an_inherited_name_is_not_rebound_on_the_subclass(toy):
    with pytest.raises(SeamError, match="there is no 'step'"):
        table(seam("Derived.step", ours_first)).install()


def test_an_error_while_binding_restores_what_was_bound_before(toy):
    before = snapshot(toy)
    toy.Engine.table = types.MappingProxyType({"size": 3})
    seams = table(seam("Manager", subclass), seam("Engine.table[size]", lambda current: current + 1))
    with pytest.raises(TypeError):
        seams.install()
    assert snapshot(toy) == before
    assert not seams.installed


def test_an_error_while_replacing_binds_nothing(toy):
    before = snapshot(toy)

    def broken(current):
        raise RuntimeError("ours is broken")

    with pytest.raises(RuntimeError, match="ours is broken"):
        table(seam("Manager", subclass), seam("Engine.step", broken)).install()
    assert snapshot(toy) == before


def test_settling_happens_once_after_all_is_bound_and_once_after_all_is_restored(toy):
    seen = []

    def settle():
        seen.append((toy.Manager.kind, toy.Engine.table["size"]))

    seams = table(
        seam("Manager", subclass, settle=settle), seam("Engine.table[size]", lambda current: current + 1, settle=settle)
    )
    seams.install()
    seams.uninstall()
    assert seen == [("ours", 4), ("theirs", 3)]


def test_an_error_while_settling_restores_and_settles_again(toy):
    calls = []

    def settle():
        calls.append(toy.Manager.kind)
        if toy.Manager.kind == "ours":
            raise RuntimeError("the schema can not be rebuilt")

    seams = table(seam("Manager", subclass, settle=settle))
    with pytest.raises(RuntimeError, match="can not be rebuilt"):
        seams.install()
    assert toy.Manager.kind == "theirs"
    assert calls == ["ours", "theirs"]
    assert not seams.installed


def test_two_seams_on_one_name_are_a_programming_error(toy):
    with pytest.raises(ValueError, match="same target"):
        table(seam("Manager", subclass), seam("Manager", subclass))


def test_facts_are_the_same_before_and_after_installing(toy):
    checks = (
        Parameters(at("Engine.step"), ("self",)),
        Accepts(at("Engine.run"), "priority"),
        LooksUp(at("Engine.__init__"), "Manager"),
        AbstractMethods(at("Shape"), frozenset({"area"})),
        Offers(at("Colour"), "blue"),
    )
    seams = table(seam("Manager", subclass), seam("Engine.step", ours_first, *checks), seam("Engine.gone", ours_first))
    facts = seams.facts()
    assert facts == [
        "toy_foreign:Manager is a type",
        "toy_foreign:Engine.step is a function",
        "toy_foreign:Engine.step(self, request)",
        "toy_foreign:Engine.run takes priority: yes",
        "toy_foreign:Engine.__init__ looks up Manager: yes",
        "toy_foreign:Shape has the abstract methods area, name",
        "toy_foreign:Colour offers red, green",
        "missing: toy_foreign:Engine.gone: there is no 'gone'",
    ]
    installable = table(
        seam("Manager", subclass), seam("Engine.step", ours_first, Parameters(at("Engine.step"), ("self", "request")))
    )
    before = installable.facts()
    installable.install()
    assert installable.facts() == before


@pytest.mark.parametrize(
    ("check", "part"),
    [
        (Parameters(at("Engine.run"), ("self", "job")), "(self, request, priority)"),
        (Accepts(at("Engine.run"), "deadline"), "takes no 'deadline'"),
        (LooksUp(at("Engine.run"), "Manager"), "does not look 'Manager' up"),
        (LooksUp(at("Engine"), "Colour"), "does not look 'Colour' up"),
        (AbstractMethods(at("Shape"), frozenset({"area", "colour"})), "new ['name'], gone ['colour']"),
        (Offers(at("Colour"), "blue"), "does not offer 'blue'"),
    ],
)
def test_each_check_complains_about_what_does_not_fit(toy, check, part):
    assert part in check.complaint(Target.read)


@pytest.mark.parametrize(
    "check",
    [
        Parameters(at("Engine.run"), ("self", "request")),
        Accepts(at("Engine.run"), "priority"),
        LooksUp(at("Engine.run"), "step"),
        LooksUp(at("Engine"), "step"),
        AbstractMethods(at("Shape"), frozenset({"area", "name"})),
        Offers(at("Colour"), "red"),
        Exists(at("Engine.table[size]")),
    ],
)
def test_each_check_is_silent_where_it_fits(toy, check):
    assert check.complaint(Target.read) is None


def test_a_name_looked_up_inside_a_comprehension_counts(toy):
    assert LooksUp(at("Engine.run"), "step").complaint(Target.read) is None


def test_a_missing_target_is_an_error_of_its_own(toy):
    with pytest.raises(MissingTargetError, match="'colour'"):
        at("Engine.table[colour]").read()


@pytest.mark.parametrize("path", ["", "a..b", "a[", "1a", "a b"])
def test_a_path_that_is_none_is_a_programming_error(toy, path):
    with pytest.raises(ValueError, match="not a path"):
        at(path).read()


def test_an_abstract_class_without_abstract_methods_says_so(toy):
    class Plain(ABC):  # noqa: B024  (that is the case)
        pass

    class Full(ABC):
        @abstractmethod
        def area(self): ...

    toy.Plain, toy.Full = Plain, Full
    assert AbstractMethods(at("Plain"), frozenset()).complaint(Target.read) is None
    assert AbstractMethods(at("Full"), frozenset({"area"})).complaint(Target.read) is None
