"""Parts of models from files that anybody may have written: what points outside a part is refused when it is read."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import treaty
from tables import real_table, with_categories
from treaty.errors import ConfigError
from treaty.models.trees import load_part


@pytest.fixture(scope="module")
def part():
    X, y = real_table("multiclass", rows=90)
    model = treaty.GBDTClassifier(n_estimators=1, max_depth=2, min_child_samples=3, n_jobs=1)
    return model.fit(with_categories(X), y).parts_["pooled"]


def of_tree(name, change):
    """Return a change of an array of the first tree."""

    def changed(part):
        tree = part.forest.trees[0]
        array = getattr(tree, name).copy()
        object.__setattr__(tree, name, array if (new := change(array)) is None else new)

    return changed


FAULTS = {
    "names a column the party does not have": lambda part: part.splits.feature.__setitem__(0, 99),
    "a split on no category": lambda part: part.splits.category_left.__setitem__(0, b""),
    "trees of other parties": lambda part: setattr(part, "party", "another"),
    "not of its classes": lambda part: setattr(part.forest, "classes", [0, 1]),
    "without some of its trees": lambda part: part.forest.trees.pop(),
    "a round without": lambda part: setattr(part.forest, "parallel", 0),
    "of uneven arrays": of_tree("gain", lambda gain: gain[:-1]),
    "that is no number": of_tree("value", lambda value: value.__setitem__(1, np.nan)),
    "do not follow their parents": of_tree("left", lambda left: left.__setitem__(0, 1 << 20)),
    "several parents or none": of_tree("left", lambda left: left.__setitem__(0, -1)),
    "without an owner": of_tree("source", lambda source: source.__setitem__(0, 3)),
    "not in the table": of_tree("record", lambda record: record.__setitem__(0, 999)),
}


@pytest.mark.parametrize("text", FAULTS)
def test_what_points_outside_a_part_is_refused(part, text, tmp_path):
    part.save(tmp_path / "a.part")
    assert load_part(tmp_path / "a.part").model_id == part.model_id
    changed = copy.deepcopy(part)
    FAULTS[text](changed)
    changed.save(tmp_path / "a.part")
    with pytest.raises(ConfigError, match=f"expected a Treaty model, got .*{text}"):
        load_part(tmp_path / "a.part")
