package training

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v4"

	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
)

// configFlag is the flag --config: a YAML file with the values of the other flags.
type configFlag struct {
	file  string
	flags *pflag.FlagSet // of the command
}

const (
	ConfigFile     = "config.yaml" // in the folder of --out
	configBytesMax = 1 << 20
)

// ownFlags are flags that differ between the workers of a job, or between runs: a config file has no value for them.
var ownFlags = []string{"config", "help", "worker", "workers", "rdzv-endpoint", "rdzv-id", "dashboard", "metrics"}

// alternatives are flags of which only one can be given. One on the command line replaces the others of the file.
var alternatives = [][]string{
	{"global-batch", "batch-per-replica"},
	{"clip-norm", "clip-value"},
	{"replicas", "devices"},
}

func (o *configFlag) add(f *pflag.FlagSet) {
	o.flags = f
	f.StringVar(&o.file, "config", "", "read flags from this YAML `file`")
}

// read sets the flags that the file has a value for, except those that are set on the command line.
func (o *configFlag) read(cmd *cobra.Command) error {
	if !o.flags.Changed("config") {
		return nil
	}
	values, err := readConfig(o.file)
	if err != nil {
		return fmt.Errorf("--config %s: %w", o.file, err)
	}
	given := map[string]bool{} // on the command line
	o.flags.Visit(func(f *pflag.Flag) {
		given[f.Name] = true
		for _, group := range alternatives {
			for _, name := range group {
				given[name] = given[name] || slices.Contains(group, f.Name)
			}
		}
	})
	for _, v := range values {
		if err := o.set(cmd, v, given[v.name]); err != nil {
			return cli.Usagef("--config %s, line %d: %v", o.file, v.line, err)
		}
	}
	return cli.CheckNumbers(cmd)
}

// set sets one flag, unless it was given on the command line.
func (o *configFlag) set(cmd *cobra.Command, v configValue, given bool) error {
	f := o.flags.Lookup(v.name)
	switch {
	case f == nil || f.Name == "config" || f.Name == "help":
		var names []string
		o.flags.VisitAll(func(f *pflag.Flag) { names = append(names, f.Name) })
		if name := cli.Closest(v.name, names); name != "" && name != v.name {
			return fmt.Errorf("unknown key %q: did you mean %s?", v.name, name)
		}
		return fmt.Errorf("unknown key %q: want the name of a flag of %s", v.name, cmd.CommandPath())
	case given || isDefault(f, v.texts):
		return nil
	}
	if list, ok := f.Value.(pflag.SliceValue); ok {
		f.Changed = true
		return list.Replace(v.texts)
	}
	if len(v.texts) != 1 {
		return fmt.Errorf("%s is a list: want one value", v.name)
	}
	if err := o.flags.Set(v.name, v.texts[0]); err != nil {
		return cli.ExplainFlag(cmd, err)
	}
	return nil
}

// isDefault reports whether the texts are the default of a flag, which has another meaning than the same value given:
// it may depend on other flags.
func isDefault(f *pflag.Flag, texts []string) bool {
	if _, ok := f.Value.(pflag.SliceValue); ok {
		return len(texts) == 0
	}
	return len(texts) == 1 && texts[0] == f.DefValue
}

// configValue is the value of one key of a config file.
type configValue struct {
	name  string
	texts []string // several for a list
	line  int
}

// readConfig reads the keys of a config file, in their order.
func readConfig(file string) ([]configValue, error) {
	r, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	text, err := io.ReadAll(io.LimitReader(r, configBytesMax+1))
	if err != nil {
		return nil, err
	}
	if len(text) > configBytesMax {
		return nil, cli.Usagef("the file has more than %d bytes: want a list of flags", configBytesMax)
	}
	var doc yaml.Node
	if err := yaml.Unmarshal(text, &doc); err != nil {
		return nil, cli.Usagef("%v", err)
	}
	if len(doc.Content) == 0 { // an empty file
		return nil, nil
	}
	top := doc.Content[0]
	if top.Kind != yaml.MappingNode {
		return nil, cli.Usagef("want lines such as \"epochs: 3\", one for each flag")
	}
	var out []configValue
	for i := 0; i < len(top.Content); i += 2 {
		v := configValue{name: top.Content[i].Value, line: top.Content[i].Line}
		if slices.ContainsFunc(out, func(o configValue) bool { return o.name == v.name }) {
			return nil, cli.Usagef("line %d: %s is set twice", v.line, v.name)
		}
		nodes := []*yaml.Node{top.Content[i+1]}
		if nodes[0].Kind == yaml.SequenceNode {
			nodes = nodes[0].Content
		}
		for _, n := range nodes {
			if n.Kind != yaml.ScalarNode {
				return nil, cli.Usagef("line %d: the value of %s must be a text, a number or a list of these", v.line, v.name)
			}
			v.texts = append(v.texts, n.Value)
		}
		out = append(out, v)
	}
	return out, nil
}

// values returns the values of all flags, as this run uses them.
func (o *configFlag) values(replicas int) *yaml.Node {
	top := &yaml.Node{Kind: yaml.MappingNode}
	o.flags.VisitAll(func(f *pflag.Flag) {
		if slices.Contains(ownFlags, f.Name) {
			return
		}
		value := &yaml.Node{Kind: yaml.ScalarNode, Value: f.Value.String()}
		switch f.Value.Type() {
		case "string":
			value.Tag = "!!str" // quoted where it looks like a number
		case "int": // one that follows from other flags
			if f.Name == "epochs" && value.Value == "-1" {
				value.Value = f.DefValue
			}
			if f.Name == "replicas" && replicas > 0 {
				value.Value = fmt.Sprint(replicas)
			}
		}
		if list, ok := f.Value.(pflag.SliceValue); ok {
			value = &yaml.Node{Kind: yaml.SequenceNode, Style: yaml.FlowStyle}
			for _, text := range list.GetSlice() {
				item := &yaml.Node{Kind: yaml.ScalarNode, Value: text}
				if f.Value.Type() == "stringSlice" {
					item.Tag = "!!str"
				}
				value.Content = append(value.Content, item)
			}
		}
		top.Content = append(top.Content, &yaml.Node{Kind: yaml.ScalarNode, Value: f.Name}, value)
	})
	return top
}

// write writes the values into a file that --config reads.
func (o *configFlag) write(file string, values *yaml.Node) error {
	var b bytes.Buffer
	fmt.Fprintf(&b, "# All flags of a run of lockstep %s. To repeat it into another folder:\n"+
		"#   lockstep train --config %s --out FOLDER\n"+
		"# Other files that it names, such as those of best, csv-log and checkpoint-dir, are used again.\n",
		strings.ReplaceAll(cli.Version(), "\n", " "), ConfigFile)
	e := yaml.NewEncoder(&b)
	e.SetIndent(2)
	if err := errors.Join(e.Encode(values), e.Close()); err != nil {
		return fmt.Errorf("writing the config file: %w", err)
	}
	if err := cli.WriteFile(file, b.Bytes()); err != nil {
		return fmt.Errorf("writing the config file: %w", err)
	}
	return nil
}
