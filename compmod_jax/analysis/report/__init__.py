"""Reports: pages, pictures in the house style, tables of results."""
