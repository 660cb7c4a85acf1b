"""A pipeline stage: part of the model (`stage`), run in schedule order over links (`worker`)."""
