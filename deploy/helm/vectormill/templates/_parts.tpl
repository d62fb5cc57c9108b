{{/* Names and parts that several templates share. */}}

{{- define "vectormill.fullname" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "vectormill.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "vectormill.labels" -}}
{{ include "vectormill.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{- define "vectormill.metadata" -}}
name: {{ include "vectormill.fullname" .root }}-{{ .component }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "vectormill.labels" . | nindent 2 }}
{{- end }}

{{- define "vectormill.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}{{ .Values.serviceAccount.name | default (include "vectormill.fullname" .) }}{{ else }}{{ .Values.serviceAccount.name | default "default" }}{{ end }}
{{- end }}

{{- define "vectormill.image" -}}
image: {{ printf "%s:%s" .image.repository (.image.tag | default .root.Chart.AppVersion) | quote }}
imagePullPolicy: {{ .image.pullPolicy | default "IfNotPresent" }}
{{- end }}

{{/* Common fields of every pod. Service links are off: a Service named vectormill-api would set VECTORMILL_API_PORT. */}}
{{- define "vectormill.pod" -}}
enableServiceLinks: false
automountServiceAccountToken: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "vectormill.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- define "vectormill.secretVariable" -}}
- name: {{ .name }}
  valueFrom: {secretKeyRef: {name: {{ .root.Values.secrets.existingSecret | quote }}, key: {{ .key | quote }}}}
{{- end }}

{{/* With `direct`, the URL is that of Postgres itself instead of a pooler's. */}}
{{- define "vectormill.env" -}}
{{- $secrets := .root.Values.secrets }}
{{- $databaseKey := ternary ($secrets.directDatabaseUrlKey | default $secrets.databaseUrlKey) $secrets.databaseUrlKey (.direct | default false) }}
{{- if ne .component "flower" }}
{{ include "vectormill.secretVariable" (dict "root" .root "name" "VECTORMILL_DATABASE_URL" "key" $databaseKey) }}
{{- end }}
{{ include "vectormill.secretVariable" (dict "root" .root "name" "VECTORMILL_REDIS_URL" "key" $secrets.redisUrlKey) }}
{{- if and $secrets.readerDatabaseUrlKey (has .component (list "api" "indexer")) }}
{{ include "vectormill.secretVariable" (dict "root" .root "name" "VECTORMILL_READER_DATABASE_URL" "key" $secrets.readerDatabaseUrlKey) }}
{{- end }}
{{- with .root.Values.models }}
- name: VECTORMILL_MODELS
  value: {{ toJson . | quote }}
{{- end }}
{{- range $name, $value := merge (dict) (.part.env | default dict) .root.Values.env }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end }}

{{/* The root file system is read-only, so these volumes hold written files for the life of the pod. */}}
{{- define "vectormill.mounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: cache, mountPath: /home/vectormill/.cache}
{{- if .root.Values.modelVolume }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- end }}

{{- define "vectormill.volumes" -}}
- {name: tmp, emptyDir: {}}
- name: cache
  {{- toYaml (.cache | default (dict "emptyDir" dict)) | nindent 2 }}
{{- with .root.Values.modelVolume }}
- name: models
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "vectormill.budget" }}
{{- if .root.Values.podDisruptionBudgets }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "vectormill.metadata" . | nindent 2 }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels:
      {{- include "vectormill.selector" . | nindent 6 }}
{{- end }}
{{- end }}

{{/* A probe of the heartbeat of a process without a port. Heartbeats are in Postgres, so this is no liveness probe:
     an outage of Postgres would restart workers that hold vectors which are not committed yet. */}}
{{- define "vectormill.signOfLife" -}}
exec:
  command:
    {{- append .root.Values.healthcheck .subject | toYaml | nindent 4 }}
periodSeconds: 30
timeoutSeconds: 20
failureThreshold: 3
{{- end }}
