"""Operations: validate, plan, take memory from the workspace, launch."""
