{{- define "headrace.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- define "headrace.app" -}}
{{- $line := regexFind `(?m)^app\s*=\s*["'][A-Za-z0-9_-]+["']` .Values.settings -}}
{{- regexFind `[A-Za-z0-9_-]+` (regexReplaceAll `^app\s*=\s*` $line "") | required `settings: got none with a line such as app = "main", expected the text of headrace.toml: --set-file settings=headrace.toml` -}}
{{- end }}

{{- define "headrace.account" -}}
{{- .Values.serviceAccount.name | default (include "headrace.name" .) -}}
{{- end }}

{{- define "headrace.selector" -}}
app.kubernetes.io/name: headrace
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- end }}

{{- define "headrace.labels" -}}
{{ include "headrace.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{- define "headrace.pod" -}}
{{- $values := .root.Values -}}
serviceAccountName: {{ include "headrace.account" .root }}
automountServiceAccountToken: false
terminationGracePeriodSeconds: {{ .config.graceSeconds }}
{{- with $values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext: {{- toYaml $values.podSecurityContext | nindent 2 }}
{{- with .config.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .config.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
containers:
  - name: {{ .role }}
    image: "{{ $values.image.repository }}:{{ $values.image.tag | default .root.Chart.AppVersion }}{{ with $values.image.digest }}@{{ . }}{{ end }}"
    imagePullPolicy: {{ $values.image.pullPolicy }}
    args: {{ toJson .args }}
    securityContext: {{- toYaml $values.securityContext | nindent 6 }}
    env:
      - {name: HEADRACE_METRICS_LISTEN, value: "0.0.0.0:9200"}
      {{- range $name, $value := $values.env }}
      - {name: {{ $name }}, value: {{ $value | quote }}}
      {{- end }}
    {{- with .config.secret | default $values.secret }}
    envFrom:
      - secretRef: {name: {{ . }}}
    {{- end }}
    {{- if .probed }}
    ports:
      - {name: metrics, containerPort: 9200}
      {{- if eq .role "serve" }}
      - {name: http, containerPort: {{ $values.service.port }}}
      {{- end }}
    startupProbe:
      httpGet: {path: /healthz, port: metrics}
      periodSeconds: 10
      failureThreshold: 120
    livenessProbe:
      httpGet: {path: /healthz, port: metrics}
      periodSeconds: 15
      timeoutSeconds: 10
      failureThreshold: 6
    readinessProbe:
      httpGet: {path: /healthz, port: {{ ternary "http" "metrics" (eq .role "serve") }}}
      periodSeconds: 5
    {{- end }}
    resources: {{- toYaml .config.resources | nindent 6 }}
    volumeMounts:
      - {name: kept, mountPath: /var/lib/headrace}
      - {name: tmp, mountPath: /tmp}
      {{- if .config.cache }}
      - {name: cache, mountPath: /var/lib/headrace/.cache}
      {{- end }}
      {{- if .config.shm }}
      - {name: shm, mountPath: /dev/shm}
      {{- end }}
      - {name: settings, mountPath: /var/lib/headrace/headrace.toml, subPath: headrace.toml, readOnly: true}
      {{- if $values.modelClaim }}
      - {name: model, mountPath: /var/lib/headrace/model, readOnly: true}
      {{- end }}
      {{- if $values.files }}
      - {name: files, mountPath: /etc/headrace, readOnly: true}
      {{- end }}
volumes:
  - name: settings
    configMap: {name: {{ include "headrace.name" .root }}}
  - name: tmp
    emptyDir: {}
  {{- if not .config.disk }}
  - name: kept
    emptyDir: {}
  {{- end }}
  {{- with .config.cache }}
  - name: cache
    emptyDir: {sizeLimit: {{ . }}}
  {{- end }}
  {{- with .config.shm }}
  - name: shm
    emptyDir: {medium: Memory, sizeLimit: {{ . }}}
  {{- end }}
  {{- with $values.modelClaim }}
  - name: model
    persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}
  {{- end }}
  {{- with $values.files }}
  - name: files
    secret: {secretName: {{ . }}, defaultMode: 0440}
  {{- end }}
{{- end }}
