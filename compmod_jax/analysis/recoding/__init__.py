"""How recurrent models read sentences, with recoding and without."""
