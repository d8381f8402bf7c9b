//go:build !linux

package main

import "os/exec"

// startOn starts a process. The processor is the system's choice.
func startOn(_ int, cmd *exec.Cmd) error { return cmd.Start() }
