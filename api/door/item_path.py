"""The path of an item, whose key may have any characters, as the router and the table of scopes read it."""

from typing import Final

from starlette.convertors import PathConvertor, register_url_convertor


class ItemKeyConvertor(PathConvertor):
    """Takes the rest of a path with its line breaks, which `path` lacks: it takes the key "a\\n" for "a"."""

    regex = r"[\s\S]*"


register_url_convertor("item_key", ItemKeyConvertor())
ITEM_PATH: Final = "/v1/collections/{name}/items/{key:item_key}"
