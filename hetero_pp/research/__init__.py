"""Makes the tables of papers: `hetero-pp reproduce`. Nothing else of the product imports this folder."""
