"""Create index runs for collections that need one, after loads and after deletions."""

import logging
from typing import Any, Final

from sqlalchemy import Engine

from vectormill.collections.collection import AUTO
from vectormill.collections.indexes import (
    IN_USE_SECONDS,
    MaintainedCollection,
    list_maintained,
    list_operator_classes,
    share_removed,
)
from vectormill.domain.errors import CollectionNotFound
from vectormill.runs.run import INDEX
from vectormill.runs.runs import create_run
from vectormill.search.filter_sql import define_filter_indexes
from vectormill.settings import Settings

logger = logging.getLogger(__name__)

# A build waits until a load has ended. Single puts go on at all times, so this many pending items do not
# delay it.
LARGEST_TRICKLE: Final = 1000


class IndexMaintainer:
    """A scheduler duty that creates runs of the kind `index`, which an indexer carries out.

    The options of a run give its reason.
    """

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings

    def tend(self) -> int:
        """Carry out one round. Return the number of runs created."""
        settings = self._settings
        with self._engine.connect() as connection:
            tended = list_maintained(connection, least_rows=settings.index_rows)
        needs = [(each.collection, find_need(each, settings)) for each in tended]
        num_runs = 0
        for collection, need in needs:
            if need is None:
                continue
            try:
                with self._engine.begin() as connection:
                    create_run(connection, collection, INDEX, options=need)
            except CollectionNotFound:
                continue  # the collection was deleted since it was listed
            logger.info("The index of %s: %s", collection, need["because"])
            num_runs += 1
        return num_runs


def find_need(tended: MaintainedCollection, settings: Settings) -> dict[str, Any] | None:
    """Return the options of the run that the collection needs now; None if it needs none."""
    if tended.needs_codebook:
        return {"only_codes": True, "because": "Multi-vectors are to become codes, and have no codebook yet."}
    is_loading = tended.num_waiting > LARGEST_TRICKLE
    lacking = define_filter_indexes(tended.generation_id, tended.filters).keys() - tended.attribute_indexes
    if lacking and not is_loading:
        return {"because": f"Indexes for filters are missing: {', '.join(sorted(lacking))}."}
    wanted = set(list_operator_classes(tended.spec))
    if not wanted or not tended.wants_index:
        return None
    if wanted - set(tended.operator_classes):
        if is_loading:
            return None
        wants = f"policy auto builds one at {settings.index_rows:,} rows or more"
        wants = wants if tended.policy == AUTO else f"the policy is {tended.policy}"
        missing = ", ".join(sorted(wanted - set(tended.operator_classes)))
        return {"because": f"There is no index for {tended.num_rows:,} rows by {missing}, and {wants}."}
    if is_loading:
        return _find_need_of_load(tended, settings)
    worn = share_removed(tended.record, tended.num_removed)
    if worn > settings.index_rebuild_share:
        return {
            "rebuild": True,
            "because": f"{worn:.0%} of its rows were deleted or replaced since it was built "
            "(VECTORMILL_INDEX_REBUILD_SHARE).",
        }
    return None


def _find_need_of_load(tended: MaintainedCollection, settings: Settings) -> dict[str, Any] | None:
    is_large = tended.num_waiting > max(
        settings.index_bulk_share * tended.num_rows, settings.index_rows, LARGEST_TRICKLE
    )
    if not is_large or tended.policy != AUTO or tended.is_in_use or not tended.has_own_index:
        return None
    return {
        "drop": True,
        "because": f"{tended.num_waiting:,} items are waiting to be written to {tended.num_rows:,} rows, "
        f"more than {settings.index_bulk_share:.0%} (VECTORMILL_INDEX_BULK_SHARE), and no "
        f"search has used the index for {IN_USE_SECONDS / 60:g} minutes. It is rebuilt "
        "afterwards.",
    }
