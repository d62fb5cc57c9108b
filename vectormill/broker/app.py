"""The Celery app with its settings and their reasons, shared by publisher, worker and Flower.

Evidence for the settings is in docs/ARCHITECTURE.md; issue numbers are those of celery or kombu on GitHub.
"""

import ssl

from celery import Celery
from celery.loaders.app import AppLoader

ENCODE_CHUNK = "encode.chunk"
QUEUE_PREFIX = "encode."
# The priority steps in Redis; messages of the first are delivered first.
INTERACTIVE_STEP, BULK_STEP = 0, 9


def queue_of(model: str) -> str:
    """Return the name of the queue of a model.

    Messages are routed by queue name only, because a named exchange loses its bindings in a FLUSHALL.
    """
    return QUEUE_PREFIX + model


def make_app(redis_url: str) -> Celery:
    """Return a Celery app on this Redis. Only the worker registers tasks; other processes publish by name."""
    # A loader that is given by its name is imported from the current folder, and fix-ups import the settings of a
    # project in Django.
    app = Celery("vectormill", broker=redis_url, loader=AppLoader, fixups=())
    app.conf.update(
        # Job state is in Postgres, so there is no result backend: nothing can leak there, and there are no
        # chords.
        result_backend=None,
        task_ignore_result=True,
        task_serializer="json",
        accept_content=["json"],
        # By default kombu accepts any certificate for a rediss:// URL that names no ssl_cert_reqs; redis-py
        # does not.
        broker_use_ssl={"ssl_cert_reqs": ssl.CERT_REQUIRED} if redis_url.startswith("rediss:") else None,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,  # the default stops after 100 attempts
        broker_connection_timeout=5,
        broker_pool_acquire_timeout=10,
        broker_transport_options={
            "visibility_timeout": 3600,  # the same in all processes, and far above the time of a chunk
            "unacked_restore_interval": 10,
            "socket_timeout": 30,  # above the 1 s of BRPOP; bounds a publish on a dead connection (#9705)
            "socket_connect_timeout": 5,
            "socket_keepalive": True,
            "health_check_interval": 10,  # finds a half-open consumer connection (kombu #2492)
            "retry_on_timeout": False,  # a blindly repeated publish only makes duplicates
            "queue_order_strategy": "priority",
            # Interactive before bulk, among the few messages that are waiting.
            "priority_steps": [INTERACTIVE_STEP, BULK_STEP],
            "client_name": "vectormill",
        },
        task_publish_retry=True,
        task_publish_retry_policy={
            "max_retries": 2,
            "interval_start": 0,
            "interval_step": 0.2,
            "interval_max": 0.5,
        },
        task_default_queue="encode.unrouted",
        task_acks_late=True,
        task_reject_on_worker_lost=False,  # Postgres decides what runs again; True would loop for ever
        task_retry_on_worker_lost=False,
        worker_prefetch_multiplier=1,  # with late acks: as many messages as slots, and none hoarded
        worker_cancel_long_running_tasks_on_connection_loss=False,  # fences make a second copy harmless
        worker_enable_prefetch_count_reduction=False,
        worker_send_task_events=True,  # for Flower
        task_send_sent_event=False,
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
        # Anyone who can write to Redis could end workers and make them consume other queues, and we do not
        # need it.
        worker_enable_remote_control=False,
        # A heartbeat event every 10 s is enough for Flower and lets an idle worker stay idle.
        broker_heartbeat=0,
        timezone="UTC",
        enable_utc=True,
    )
    return app
