"""From shards to rows of tokens: documents, blends, packing, segment pairs."""
