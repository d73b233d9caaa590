"""The main job: a small Llama, trained with tensor and sequence parallelism on the layers here."""
