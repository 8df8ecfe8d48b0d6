"""Every public name is documented in full: all parameters, and examples that run and print what they say."""

from __future__ import annotations

import doctest
import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

import treaty
from treaty.estimators.trees import GBDTClassifier, GBDTRanker, GBDTRegressor
from treaty.systems.options import spelled_out

PAGE = (Path(__file__).parents[2] / "docs/reference.rst").read_text()
NAMES = re.findall(r"^\.\. auto\w+:: (treaty\.[\w.]+)$", PAGE, flags=re.MULTILINE)


def public(name):
    module, _, name = name.rpartition(".")
    return getattr(import_module(module), name)


def section(of, title):
    """Return a section of a numpydoc docstring, or nothing."""
    found = re.search(
        rf"^{title}\n-+\n(.*?)(?=^[A-Z][\w ]+\n---+$|\Z)", inspect.cleandoc(of.__doc__), re.DOTALL | re.MULTILINE
    )
    return found[1] if found else ""


def entries(text):
    """Return what a section says of each name."""
    found = re.findall(r"^(\*{0,2}\w[^\n:]*?)(?: : (.+))?\n((?: {4}.+\n?)*)", text, re.MULTILINE)
    return {name.strip("*"): (kind, meaning) for names, kind, meaning in found for name in names.split(", ")}


def test_the_page_lists_every_public_name():
    assert {f"treaty.{name}" for name in treaty.__all__} < set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_is_documented_and_there_are_examples(name):
    of = public(name)
    said = {**entries(section(of, "Attributes")), **entries(section(of, "Parameters"))}
    parameters = list(inspect.signature(of).parameters)
    assert [each for each in parameters if each not in said or not said[each][1].strip()] == []
    assert ">>> " in section(of, "Examples")


@pytest.mark.parametrize("name", NAMES)
def test_examples_print_what_they_say(name):
    of = public(name)
    options = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL * (of is treaty.DataError)
    runner = doctest.DocTestRunner(optionflags=options, verbose=False)
    example = doctest.DocTestParser().get_doctest(inspect.cleandoc(of.__doc__), {}, name, None, None)
    printed = []
    runner.run(example, out=printed.append)
    assert runner.failures == 0, "".join(printed)
    assert runner.tries == len(example.examples) > 0


@pytest.mark.parametrize("name", NAMES)
def test_see_also_names_what_there_is(name):
    of = public(name)
    for names in entries(section(of, "See Also")):
        for each in names.split(", "):
            place = each if each.startswith("treaty.") else f"{name.rpartition('.')[0]}.{each}"
            module, _, attribute = place.rpartition(".")
            try:
                public(place)
            except ModuleNotFoundError:  # a method
                assert hasattr(public(module), attribute)


def test_shared_parameters_are_shown_in_full():
    first = entries(section(GBDTClassifier, "Parameters"))
    for kind in (GBDTRegressor, GBDTRanker):
        said = entries(section(kind, "Parameters"))
        assert said["max_depth"] == first["max_depth"]
        assert said["objective"] != first["objective"]
        assert "As for" not in section(kind, "Parameters") + section(kind, "Attributes")


@pytest.mark.parametrize("kind", [of for name in NAMES if hasattr(of := public(name), "fit")])
def test_methods_are_documented_without_another_page(kind):
    methods = [of for name, of in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")]
    for of in methods:
        if not of.__module__.startswith("treaty.") or of.__name__ in ("score", "set_params"):  # scikit-learn's
            continue
        assert not re.search(r"\b[Aa]s (for|in) `", of.__doc__), of
        said = entries(section(of, "Parameters"))
        parameters = [name for name in inspect.signature(of).parameters if name != "self"]
        missing = [name for name in parameters if not said.get(name, ("", ""))[1].strip()]
        assert missing == [] or "Raise ConfigError" in of.__doc__, of


def test_a_docstring_is_filled_in_from_another():
    class Source:
        """Source.

        Parameters
        ----------
        a, b : int, default 0
            Numbers.
        c
            Third.
        """

    def filled(b, c, d):
        """Do it.

        Parameters
        ----------
        c,
        b
            As for `Source`.
        d : str
            As for `Source`, but text.
        """

    spelled_out(Source)(filled)
    assert filled.__doc__ == (
        "Do it.\n\nParameters\n----------\nc\n    Third.\nb : int, default 0\n    Numbers.\n"
        "d : str\n    As for `Source`, but text."
    )

    def misspelt(e):
        """Do it.

        Parameters
        ----------
        e
            As for `Source`.
        """

    with pytest.raises(KeyError):
        spelled_out(Source)(misspelt)
