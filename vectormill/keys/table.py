"""The table of API keys."""

from sqlalchemy import BigInteger, CheckConstraint, Column, Identity, Index, LargeBinary, Table, Text, text

from vectormill.db.schema import metadata, moment, one_of
from vectormill.keys.api_key import SCOPES

api_keys = Table(
    "api_keys",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("name", Text, nullable=False),
    Column("hash", LargeBinary, nullable=False, unique=True),  # SHA-256 of the secret
    Column("scope", Text, CheckConstraint(one_of("scope", SCOPES), name="scope"), nullable=False),
    moment("created_at", is_now=True),
    moment("expires_at"),
    moment("revoked_at"),
    moment("last_used_at"),  # accurate to the hour, so that not every request writes a row
    # A name is free again when its key is revoked, so that a secret can be replaced under the same name.
    Index("uq_api_keys_name", "name", unique=True, postgresql_where=text("revoked_at IS NULL")),
)
