"""The progress of a job that is watched. Reads the API's job object, and knows nothing of how it is fetched."""

from collections.abc import Mapping
from typing import Any

from vectormill.client.views.look import Look
from vectormill.jobs.job import PAUSED


def look_at_job(job: Mapping[str, Any]) -> Look:
    """Return a job's state, its counts, and what it waits for."""
    num_items = job["num_items"]
    share = count_ended(job) / num_items if num_items else None
    return Look(job["state"], describe_counts(job), share, job.get("waiting_because"))


def count_ended(job: Mapping[str, Any]) -> int:
    """Return items that have a vector or an error."""
    return int(job["num_done"]) + int(job["num_failed"])


def describe_counts(job: Mapping[str, Any]) -> str:
    """Return items, failures, rate and remaining time in one line."""
    parts = [f"{count_ended(job):,} of {job['num_items']:,} items"]
    if job["num_failed"]:
        parts.append(f"{job['num_failed']:,} failed")
    if job.get("num_retried_chunks"):
        parts.append(f"{job['num_retried_chunks']:,} chunks retried")
    if job.get("items_per_second") and job["state"] != PAUSED:  # a rate would look as if it went on
        parts.append(f"{job['items_per_second']:,.0f}/s")
    if job.get("eta_seconds"):
        parts.append(f"{describe_seconds(job['eta_seconds'])} left")
    return " · ".join(parts)


def describe_seconds(seconds: float) -> str:
    """12 s, 3:25 min, 4:05 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02} h"
