"""Commands for collections and what is in them."""
