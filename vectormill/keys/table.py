"""The table of API keys."""

from sqlalchemy import Column, LargeBinary, Table, Text

from vectormill.db.schema import choice, index, metadata, moment, serial
from vectormill.keys.api_key import SCOPES

api_keys = Table(
    "api_keys",
    metadata,
    serial(),
    Column("name", Text, nullable=False),
    Column("hash", LargeBinary, nullable=False, unique=True),  # SHA-256 of the secret
    choice("scope", SCOPES),
    moment("created_at", is_now=True),
    moment("expires_at"),
    moment("revoked_at"),
    moment("last_used_at"),  # accurate to the hour, so that not every request writes a row
    # A name is free again when its key is revoked, so that a secret can be replaced under the same name.
    index("uq_api_keys_name", "name", unique=True, where="revoked_at IS NULL"),
)
