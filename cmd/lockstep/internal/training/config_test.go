package training

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/clitest"
)

// TestConfigRepeats: the file that --out writes repeats the run, also where flags have other defaults, and a flag on
// the command line wins.
func TestConfigRepeats(t *testing.T) {
	dir := t.TempDir()
	first, _ := clitest.TrainInto(t, dir, append(clitest.TinyTable(t), "--replicas", "2", "--steps", "2", "--optimizer",
		"sgd", "--clip-value", "0.01", "--batch-per-replica", "7", "--compress", "int8")...)
	file := filepath.Join(dir, ConfigFile)
	again, _ := clitest.Train(t, "--config", file)
	if first["weights_hash"] != again["weights_hash"] || again["steps"] != 2.0 || again["global_batch"] != 14.0 {
		t.Errorf("the first run was %v, the second %v", first, again)
	}
	changed, _ := clitest.Train(t, "--config", file, "--global-batch", "10", "--steps", "1")
	if changed["steps"] != 1.0 || changed["global_batch"] != 10.0 || changed["optimizer"] != "sgd" {
		t.Errorf("flags on the command line do not win: %v", changed)
	}
}

// TestConfigHasAllFlags: the file has each flag, and reading it changes none.
func TestConfigHasAllFlags(t *testing.T) {
	cmd := New()
	cmd.InitDefaultHelpFlag()
	o := configFlag{flags: cmd.Flags()}
	given := map[string]string{
		"devices": "CPU:0,CPU:1", "global-batch": "12", "clip-norm": "0.5", "bucket-bytes": "64KiB", "seed": "-7",
		"compress": "powersgd:4", "shard-optimizer": "on", "out": "2024-01-01", "summary": "007", "rdzv-timeout": "90s",
		"data-plaintext": "true", "epochs": "3",
	}
	for name, value := range given {
		if err := o.flags.Set(name, value); err != nil {
			t.Fatal(err)
		}
	}
	file := filepath.Join(t.TempDir(), ConfigFile)
	if err := o.write(file, o.values(0)); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	back := New()
	if err := back.Flags().Set("config", file); err != nil {
		t.Fatal(err)
	}
	read := configFlag{file: file, flags: back.Flags()}
	if err := read.read(back); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	o.flags.VisitAll(func(f *pflag.Flag) {
		switch b := back.Flags().Lookup(f.Name); {
		case f.Name == "config" || f.Name == "help":
		case b.Value.String() != f.Value.String():
			t.Errorf("--%s was %s, and is %s", f.Name, f.Value, b.Value)
		case b.Changed != f.Changed:
			t.Errorf("--%s is given: %v, want %v", f.Name, b.Changed, f.Changed)
		}
		if want := "\n" + f.Name + ":"; strings.Contains(string(text), want) == (f.Name == "config" || f.Name == "help" ||
			f.Name == "worker" || f.Name == "workers" || f.Name == "rdzv-endpoint" || f.Name == "rdzv-id" ||
			f.Name == "dashboard" || f.Name == "metrics") {
			t.Errorf("is there a key %s? Want the opposite:\n%s", f.Name, text)
		}
	})
}

func TestWrongConfigs(t *testing.T) {
	dir := t.TempDir()
	for text, want := range map[string]string{
		"epochs: 3\nlearning-rat: 1\n":          `line 2: unknown key "learning-rat": did you mean learning-rate?`,
		"colour: 3\n":                           `line 1: unknown key "colour": want the name of a flag of train`,
		"config: other.yaml\n":                  `line 1: unknown key "config": want the name of a flag of train`,
		"epochs: many\n":                        "line 1: --epochs many: want a whole number",
		"seed: 1\ncompress: zip\n":              "line 2: --compress: ",
		"epochs: [1, 2]\n":                      "line 1: epochs is a list: want one value",
		"epochs: {a: 1}\n":                      "line 1: the value of epochs must be a text, a number or a list of these",
		"devices: [[a]]\n":                      "line 1: the value of devices must be a text, a number or a list of these",
		"epochs: 1\nepochs: 2\n":                "line 2: epochs is set twice",
		"epochs\n":                              `want lines such as "epochs: 3"`,
		"a: 'b\n":                               "--config ",
		"epochs: 9999999999999\n":               "--epochs 9999999999999: want a number up to 1000000000000",
		strings.Repeat("#", configBytesMax+1):   "the file has more than 1048576 bytes",
		"global-batch: 3\nbatch-per-replica: 2": "--global-batch and --batch-per-replica exclude each other",
	} {
		file := filepath.Join(dir, "c.yaml")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		cmd := New()
		cmd.SetArgs([]string{"--config", file})
		cmd.SilenceErrors, cmd.SilenceUsage = true, true
		err := cmd.ExecuteContext(t.Context())
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.60q: got %v, want %s", text, err, want)
		}
	}
}
