"""The backbone in timm's registry, from which smp, transformers and others take it. Only users import it."""
