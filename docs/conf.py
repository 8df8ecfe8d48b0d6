"""The documentation site, as Sphinx builds it (`make docs`): from the pages as they are read in the repository.

The source folder is the repository, so that links between pages, and from pages to other files, are the same on the
site as beside the code. The README is the first page; the order of all others is `CONTENTS`.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import treaty

ROOT = Path(__file__).resolve().parent.parent

project = "Treaty"
author = "the Treaty developers"
project_copyright = "the Treaty developers, Apache-2.0"
version = release = treaty.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
root_doc = "README"
include_patterns = ["*.md", "docs/**.md", "docs/**.rst"]
exclude_patterns = [".*", "src", "tests", "benchmarks", "site", "build", "dist"]
nitpicky = False

# Headings have the anchors that the repository's viewer gives them.
myst_heading_anchors = 5
myst_enable_extensions = ["colon_fence"]

default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # docstrings have types, shapes and units
autodoc_preserve_defaults = True
# scikit-learn's, whose docstrings refer to its own pages
_REQUESTS = [f"set_{method}_request" for method in ("fit", "predict", "predict_proba", "decision_function", "score")]
autodoc_default_options = {"exclude-members": ", ".join(["get_metadata_routing", "score", *_REQUESTS])}
napoleon_numpy_docstring = True
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = f"Treaty {release}"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
highlight_language = "text"
html_permalinks_icon = "#"
copybutton_exclude = ".linenos, .gp, .go"

# The order of a newcomer. Captions stand in the sidebar.
CONTENTS = {
    "First steps": ["docs/tutorial", "docs/howto/choose", "docs/tasks"],
    "How to": [
        "docs/howto/credit_scoring",
        "docs/howto/scorecard",
        "docs/howto/hospitals",
        "docs/howto/phones",
        "docs/from_xgboost",
        "docs/howto/from_xgboost_federated",
        "docs/howto/from_fate",
    ],
    "Systems": [
        "docs/secureboost",
        "docs/fedxgboost",
        "docs/federboost",
        "docs/fedxgb",
        "docs/logistic",
        "docs/statistics",
        "docs/growth",
        "docs/sealed",
        "docs/hidden",
    ],
    "Using a model": ["docs/prediction", "docs/interpretation", "docs/reports", "docs/serving"],
    "Jobs and nodes": [
        "docs/jobs",
        "docs/continue",
        "docs/alignment",
        "docs/nodes",
        "docs/deployment",
        "docs/network",
        "docs/platforms",
        "docs/clusters",
    ],
    "Security": ["SECURITY", "docs/audit"],
    "Reference": ["docs/reference", "docs/options", "docs/objectives", "CHANGELOG"],
    "Results": ["docs/results", "docs/measured", "docs/experiments"],
    "Explanation": [
        "docs/explanation/for-managers",
        "docs/explanation/for-cryptographers",
        "docs/explanation/encrypted_boosting",
        "docs/explanation/exact_sums_attack",
        "docs/explanation/sealed_and_hidden",
        "docs/explanation/secure_aggregation",
        "docs/explanation/alignment",
        "docs/explanation/epsilon",
        "docs/explanation/decisions",
        "docs/explanation/default_options",
    ],
    "Systems in detail": [
        "docs/explanation/alignment_security",
        "docs/explanation/audit_of_gradients",
        "docs/explanation/ciphers",
        "docs/explanation/exact_sums",
        "docs/explanation/faults",
        "docs/explanation/federboost_details",
        "docs/explanation/fedxgb_cohorts",
        "docs/explanation/fedxgb_secpred",
        "docs/explanation/fedxgboost_noise",
        "docs/explanation/fedxgboost_published",
        "docs/explanation/growth_measurements",
        "docs/explanation/histogram_inversion",
        "docs/explanation/lattice_choices",
        "docs/explanation/logistic_attacks",
        "docs/explanation/logistic_optimiser",
        "docs/explanation/logistic_standard_errors",
        "docs/explanation/losses",
        "docs/explanation/noise_forecasts",
        "docs/explanation/sealed_security",
    ],
    "For developers": ["CONTRIBUTING", "SUPPORT", "docs/architecture", "docs/lattice", "docs/first_hour"],
}


def add_contents(app: Any, name: str, source: list[str]) -> None:
    """Give the first page the sidebar's contents, and commands at one party a fence that Sphinx reads."""
    source[0] = re.sub(r"^```sh (\w+)$", r"```{code-block} sh\n:caption: At the \1", source[0], flags=re.MULTILINE)
    if name == root_doc:
        for caption, pages in CONTENTS.items():
            entries = "\n".join(pages)
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{entries}\n```\n"


def hide_signature(app: Any, what: str, *_: Any) -> tuple[str, str] | None:
    """Show no signature of a class: an estimator has sixty parameters, and a list of them with types and defaults."""
    return ("", "") if what == "class" else None


def write_index(app: Any, failure: Exception | None) -> None:
    """Have the site begin at index.html, which servers look for."""
    if failure is None and app.builder.name == "html":
        shutil.copyfile(Path(app.outdir, f"{root_doc}.html"), Path(app.outdir, "index.html"))


def setup(app: Any) -> None:
    """Connect what is above."""
    app.connect("source-read", add_contents)
    app.connect("autodoc-process-signature", hide_signature)
    app.connect("build-finished", write_index)
